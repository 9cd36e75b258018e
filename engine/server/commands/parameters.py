"""The options of a server as parameters of commands, from the command line or a file,
and the report of errors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from engine.server.options import OPTIONS, Option, ServeOptions
from guided.errors import GuidedError


def options_of(values: Mapping[str, Any]) -> ServeOptions:
    """Return the options of a server. `values` are the arguments of a command with
    `SERVER_OPTIONS`."""
    try:
        return ServeOptions.from_flat(
            {name: value for name, value in values.items() if name != "config"}
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _parameter(name: str, default: Any, kind: Any, how: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, how],
    )


def _described(option: Option) -> inspect.Parameter:
    """Describe an option to typer."""
    if option.name == "model":
        return _parameter(
            option.name, option.default, option.type, typer.Argument(help=option.help)
        )
    how: Any = typer.Option(help=option.help, rich_help_panel=option.panel)
    if option.type is bool:
        how.show_default = False
        answer = "no"
        if option.default:
            answer = "yes"
        how.help += f" Default: {answer}."
    if isinstance(option.default, tuple):
        return _parameter(option.name, [], list[str], how)
    return _parameter(option.name, option.default, option.type, how)


def _take_config(context: typer.Context, file: Path | None) -> None:
    """Take options from a file unless the command line or the environment sets them."""
    if file is None:
        return
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(
            f"{file} can't be read: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{file} must have one 'option: value' a line")
    values = {str(name).replace("-", "_"): value for name, value in given.items()}
    if unknown := values.keys() - {option.name for option in OPTIONS}:
        raise typer.BadParameter(f"{file}: there is no option {min(unknown)}")
    context.default_map = {
        name: value for name, value in values.items() if value is not None
    }


_CONFIG = typer.Option(
    help="YAML file with options by name. The command line replaces them.",
    callback=_take_config,
    is_eager=True,
    rich_help_panel="Server",
)
SERVER_OPTIONS = inspect.Signature(
    [*map(_described, OPTIONS), _parameter("config", None, Path | None, _CONFIG)]
)
"""The signature of a command that takes the options of a server."""


@contextlib.contextmanager
def reported(command: str, status: int) -> Iterator[None]:
    """Print an error that the user can correct as one line, without a traceback, and
    exit with `status`."""
    try:
        yield
    except (OSError, ValueError, GuidedError, ModuleNotFoundError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError):
            text += f": {install_advice(text)}"
        typer.secho(f"guided {command}: {text}", fg=typer.colors.RED, err=True)
        raise typer.Exit(status) from None


def install_advice(error: str) -> str:
    """Return the command that installs the missing package of a
    `ModuleNotFoundError`."""
    extras = "server"
    if "'ray" in error:
        extras += ",ray"
    # on package indexes, `guided` is another project
    return f"pip install '.[{extras}]' in a checkout of guided"
