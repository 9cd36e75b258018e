"""What several commands take: the options of a server (also from a file), a backend, a tokenizer. How they report
errors."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from engine.default_model import checkpoint_path
from engine.server.options import OPTIONS, Option, ServeOptions
from guided.backends import resolve
from guided.errors import GuidedError


def options_of(values: Mapping[str, Any]) -> ServeOptions:
    """Return the options of a server. `values` are the arguments of a command with `SERVER_OPTIONS`."""
    try:
        return ServeOptions.from_flat({name: value for name, value in values.items() if name != _CONFIG.name})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _parameter(option: Option) -> inspect.Parameter:
    """Describe an option to typer."""
    kind: Any = option.type
    default = option.default
    how: Any
    if option.name == "model":
        how = typer.Argument(help=option.help)
    else:
        how = typer.Option(help=option.help, rich_help_panel=option.panel, envvar=option.env)
    if kind is bool:
        how.show_default = False
        how.help += f" Default: {'yes' if default else 'no'}."
    if (limits := option.range) is not None:
        how.min, how.max, how.metavar = limits.least, limits.most if limits.most < math.inf else None, "N"
    if isinstance(default, tuple):
        kind, default, how.metavar = list[str], [], option.metavar
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, how]
    )


def _take_config(context: typer.Context, file: Path | None) -> None:
    """Use the options in a file where the command line and the environment have none."""
    if file is None:
        return
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file} can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{file} must have one 'option: value' a line")
    found = {str(name).replace("-", "_"): value for name, value in given.items()}
    if unknown := found.keys() - {option.name for option in OPTIONS}:
        raise typer.BadParameter(f"{file}: there is no option {min(unknown)}")
    context.default_map = {name: value for name, value in found.items() if value is not None}


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="YAML file with options by name. The command line replaces them.",
            callback=_take_config,
            is_eager=True,
            rich_help_panel="Server",
        ),
    ],
)
SERVER_OPTIONS = inspect.Signature([*map(_parameter, OPTIONS), _CONFIG])
"""The signature of a command that takes the options of a server."""


def _backend(name: str) -> str:
    try:
        return resolve(name)
    except GuidedError as error:
        raise typer.BadParameter(str(error)) from None


Backend = Annotated[str, typer.Option(help="The grammar backend, or auto.", callback=_backend)]
_TOKENIZER = "tokenizer.json, tekken.json, or a model's folder. Masks depend on it. Default: the embedded model's."
Tokenizer = Annotated[
    Path, typer.Option(help=_TOKENIZER, exists=True, default_factory=checkpoint_path, show_default=False)
]


@contextlib.contextmanager
def reported(command: str, status: int) -> Iterator[None]:
    """Print an error that the user can correct as one line, without a traceback, and exit with `status`."""
    try:
        yield
    except (OSError, ValueError, GuidedError) as error:
        if os.environ.get("GUIDED_TRACEBACK"):
            raise
        typer.secho(f"guided {command}: {' '.join(str(error).split())}", fg=typer.colors.RED, err=True)
        raise typer.Exit(status) from None
