"""The `guided` command."""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from engine.default_model import checkpoint_path
from engine.server.options import OPTIONS, Option, ServeOptions, check_names, take_api_key
from guided.backends import AUTO, resolve
from guided.errors import GuidedError


class _Command(TyperCommand):
    """A command with plain help: in rich's tables, narrow terminals cut the names of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the titles of their panels."""
        panels: dict[str, list[Any]] = {}
        for each in self.get_params(ctx):
            title = "Arguments" if each.param_type_name == "argument" else getattr(each, "rich_help_panel", None)
            panels.setdefault(title or "Options", []).extend(filter(None, [each.get_help_record(ctx)]))
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


class Kind(enum.StrEnum):
    """Kinds of constraints in files."""

    json_schema = "json_schema"
    regex = "regex"
    grammar = "grammar"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("guided"))
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


def serve(**values: Any) -> None:
    """Serve a model over HTTP, OpenAI-compatible, with guided decoding.

    Without MODEL, the server uses a small embedded model. It ends on Ctrl-C or SIGTERM.
    """
    try:
        options = take_api_key(_options(values))
        check_names(options)
        with listener_on(options.host, options.port) as listener:  # a port in use is reported at once
            from engine.server import process  # slow: torch, transformers

            process.serve(options, listener)
    except (OSError, ValueError, GuidedError) as error:  # the user can correct it: one line, no traceback
        if os.environ.get("GUIDED_TRACEBACK"):
            raise
        typer.secho(f"guided serve: {' '.join(str(error).split())}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def listener_on(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the server's socket. It does not listen yet, so early connections are refused instead of kept waiting.

    Raises:
        OSError: the address cannot be bound. The message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"can't listen on {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise OSError(f"can't listen on {host} port {port}: {error.strerror}; choose another --port") from None
        yield listener


def _options(values: dict[str, Any]) -> ServeOptions:
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


def _backend(name: str) -> str:
    try:
        return resolve(name)
    except GuidedError as error:
        raise typer.BadParameter(str(error)) from None


def doctor(**values: Any) -> None:
    """Check whether this machine can serve with these options, and say what to do. Exit status 1: it cannot."""
    from engine.server.doctor import examine

    colours = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}
    failed = False
    for finding in examine(_options(values)):
        failed |= finding.level == "error"
        level = typer.style(f"{finding.level:8}", fg=colours[finding.level])
        typer.echo(f"{level}{finding.subject}: {finding.text}")
    raise typer.Exit(failed)


@app.command(cls=_Command)
def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
) -> None:
    """Show a running server: engine, mask actors by node, queues, exposed mask time, last failures."""
    from rich.console import Console
    from rich.live import Live

    from engine.server.top import View

    view, console = View.of(url), Console()
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            time.sleep(interval)
            view.update()
            console.print(view.render())
            raise typer.Exit(view.now.problem is not None)
        with Live(view.render(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                view.update()
                live.update(view.render(), refresh=True)


_signature = inspect.Signature([_parameter(option) for option in OPTIONS])
serve.__signature__ = doctor.__signature__ = _signature  # type: ignore[attr-defined]
app.command(cls=_Command)(serve)
app.command(cls=_Command)(doctor)


@app.command(cls=_Command)
def check(
    files: Annotated[list[Path], typer.Argument(help="Files to check; - is standard input.", allow_dash=True)],
    kind: Annotated[
        Kind | None,
        typer.Option(help="What the files contain. Default: by name (.json, .regex, .lark, .gbnf) or text."),
    ] = None,
    backend: Annotated[str, typer.Option(help="The grammar backend, or auto.", callback=_backend)] = AUTO,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, tekken.json, or a model's folder. Default: the embedded model's.", exists=True
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Random valid outputs to print for each.", min=0)] = 0,
    seconds: Annotated[float, typer.Option(help="Time limit for each file.", min=0)] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    rewritten: Annotated[bool, typer.Option("--rewritten", help="Print the constraint as it was rewritten.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="What is not enforced is an error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each file.")] = False,
) -> None:
    """Check JSON schemas, regexes and grammars without a model: accepted or refused, by which backend, and why.

    The exit status is 1 if a file is refused (or, with --strict, has parts that are not enforced), 2 for a wrong call.
    """
    missing = next((file for file in files if str(file) != "-" and not file.is_file()), None)
    if missing is not None:
        raise typer.BadParameter(f"there is no file {missing}")
    from engine.server import check_command  # slow: the grammar libraries

    options = {"kind": kind, "backend": backend, "samples": samples, "seed": seed, "seconds": seconds}
    try:
        good = check_command.check_files(
            files, tokenizer or checkpoint_path(), options, rewritten=rewritten, strict=strict, as_json=as_json
        )
    except (OSError, UnicodeDecodeError, GuidedError) as error:
        typer.secho(f"guided check: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


@app.command(cls=_Command)
def maskbench(
    file: Annotated[
        Path, typer.Argument(help="MaskBench's schemas: lines of JSON, maybe .gz.", exists=True, dir_okay=False)
    ],
    backend: Annotated[str, typer.Option(help="The grammar backend, or auto.", callback=_backend)] = AUTO,
    tokenizer: Annotated[
        Path | None, typer.Option(help="As for check. Measure with a large one: the masks depend on it.", exists=True)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of a compilation.", min=0.1)] = 10.0,
    limit: Annotated[int | None, typer.Option(help="Only the first schemas.", min=1)] = None,
) -> None:
    """Run MaskBench's protocol: which schemas are enforced exactly, which are refused, and how long do masks take?

    The exit status is 1 if an invalid instance is accepted.
    """
    from engine.server import check_command

    try:
        good = check_command.run_maskbench(file, backend, tokenizer or checkpoint_path(), seconds, limit)
    except (OSError, ValueError, GuidedError) as error:
        typer.secho(f"guided maskbench: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


def main() -> None:
    """Run the console script."""
    app()
