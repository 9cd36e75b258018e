"""The `guided` command."""

from __future__ import annotations

import atexit
import os
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from engine.server.commands.check import check
from engine.server.commands.doctor import doctor
from engine.server.commands.serve import serve
from engine.server.commands.top import top


class _Command(TyperCommand):
    """A command with plain help: narrow terminals cut the names of options in rich's
    tables."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the whole first sentence. The list of commands wraps it."""
        return super().get_short_help_str(200)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the titles of their panels."""
        panels: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None) or "Options"
            if param.param_type_name == "argument":
                title = "Arguments"
            record = param.get_help_record(ctx)
            if record is not None:
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Guided decoding: an OpenAI-compatible server with outputs that satisfy a schema, regex, grammar or choice.",
)
for _command in (serve, doctor, top, check):
    app.command(cls=_Command)(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("guided"))
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Options that come before a command."""


def main() -> None:
    """Run the console script."""
    atexit.register(_close_stderr)
    app()


def _close_stderr() -> None:
    """Discard everything written to stderr from now on: at exit, Triton reports its
    leaks in 30 lines."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
