"""What several commands take: the options of a server, a backend, a tokenizer. How they report errors."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.default_model import checkpoint_path
from engine.server.options import OPTIONS, Option, ServeOptions
from guided.backends import resolve
from guided.errors import GuidedError


def options_of(values: Mapping[str, Any]) -> ServeOptions:
    """Return the options of a server. `values` are the arguments of a command with `SERVER_OPTIONS`."""
    try:
        return ServeOptions.from_flat(values)
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
    if (limits := option.range) is not None:
        how.min, how.max = limits.least, limits.most if limits.most < math.inf else None
    if isinstance(default, tuple):
        kind, default, how.metavar = list[str], [], option.metavar
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, how]
    )


SERVER_OPTIONS = inspect.Signature([_parameter(option) for option in OPTIONS])
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
