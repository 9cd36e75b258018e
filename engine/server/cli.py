"""The `guided` command."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from engine.server.listener import listener_on

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Guided decoding: an OpenAI-compatible server whose outputs satisfy a schema, regex, grammar or choice.",
)


class Pool(StrEnum):
    RAY = "ray"
    INLINE = "inline"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("guided"))
        raise typer.Exit


QUEUES = "Limits: what is under way (429 beyond)"
REQUESTS = "Limits: what one request may be (400 beyond)"


def _limit(text: str, panel: str) -> Any:
    return typer.Option(help=text, min=1, rich_help_panel=panel)


@app.callback()
def root(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A local directory, or a name on the Hugging Face hub. Default: the embedded model."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    pool: Annotated[
        Pool, typer.Option(help="Where masks are computed: Ray actors, or this process (no isolation).")
    ] = Pool.RAY,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Join this Ray cluster ('auto' finds a local one). Default: start a light one."),
    ] = None,
    num_actors: Annotated[int | None, typer.Option(help="Mask actors. Default: by the CPUs.", min=1)] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Grammar library for requests that name none: auto, llguidance, xgrammar, outlines,"
            " lm-format-enforcer."
        ),
    ] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one step, at the most.", min=1)] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context length in tokens. Default: the model's own.", min=2)
    ] = None,
    parking: Annotated[
        bool, typer.Option(help="Go on without sequences whose mask is late; they follow when it is there.")
    ] = True,
    mask_deadline: Annotated[
        float | None,
        typer.Option(help="Seconds a step waits for late masks. Default: 5 % of a mean step, at least 1 ms.", min=0),
    ] = None,
    mask_limit: Annotated[
        float, typer.Option(help="Seconds a mask may take before its request fails.", min=0.1, max=3600)
    ] = 5.0,
    max_replays: Annotated[
        int,
        typer.Option(
            help="When a mask actor dies: 0 ends the requests that were open there; more opens them elsewhere, and"
            " tries the one that may have caused it again, alone, so often.",
            min=0,
        ),
    ] = 0,
    pool_wait: Annotated[
        float, typer.Option(help="Seconds that constrained requests wait while no mask actor is up.", min=0)
    ] = 30.0,
    actor_memory_mib: Annotated[
        int | None,
        typer.Option(help="MiB that a mask actor may take. Default: 2048, or half of the machine's.", min=256),
    ] = None,
    grammar_cache_mib: Annotated[
        int, typer.Option(help="MiB that compiled grammars may weigh that no request uses.", min=0)
    ] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    logits_processors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS", help="A custom logits processor (docs/logits-processors.md). May be given again."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GUIDED_API_KEY",
            show_envvar=True,
            help="Key that requests must carry. The environment variable keeps it out of process lists.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that requests use for the model. Default: MODEL.")
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(help="How long a stream's client may read nothing before it is given up.", min=0.1)
    ] = 60.0,
    grace_seconds: Annotated[
        float, typer.Option(help="How long running generations may take to end when it is told to stop.", min=0)
    ] = 10.0,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = LogLevel.INFO,
    max_requests: Annotated[
        int, _limit("Generations running and waiting before further requests get 429.", QUEUES)
    ] = 1024,
    max_waiting: Annotated[
        int, _limit("Generations that wait (for a grammar, for their turn) before further requests get 429.", QUEUES)
    ] = 512,
    max_compiling: Annotated[
        int, _limit("Distinct constraints being compiled or waiting for it before further ones get 429.", QUEUES)
    ] = 256,
    compile_seconds: Annotated[
        float, typer.Option(help="Seconds that compiling a constraint may take.", min=0.1, rich_help_panel=QUEUES)
    ] = 10.0,
    compile_memory_mib: Annotated[int, _limit("MiB of memory that compiling a constraint may take.", QUEUES)] = 2048,
    max_n: Annotated[
        int | None, _limit("Outputs that one request may ask for (n). Default: as --max-num-seqs.", REQUESTS)
    ] = None,
    max_constraint_bytes: Annotated[int, _limit("Size of a constraint, in bytes.", REQUESTS)] = 512 * 1024,
    max_nesting: Annotated[
        int, _limit("Levels of nesting in a schema, of brackets in a regex or a grammar.", REQUESTS)
    ] = 64,
    max_alternatives: Annotated[
        int, _limit("Alternatives: anyOf and oneOf of a schema together, | of a regex or a grammar.", REQUESTS)
    ] = 2000,
    max_enum: Annotated[int, _limit("Values of an enum.", REQUESTS)] = 10_000,
    max_choices: Annotated[int, _limit("Entries of choice.", REQUESTS)] = 10_000,
    max_repetition: Annotated[
        int, _limit("Repetition bounds (nested ones multiplied), minLength, minItems and the like.", REQUESTS)
    ] = 10_000,
    max_grammar_rules: Annotated[int, _limit("Rules of a grammar.", REQUESTS)] = 5000,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible, with guided decoding.

    Without MODEL, a small embedded model is served, to try things with. Ends on Ctrl-C or SIGTERM.
    """
    try:
        with listener_on(host, port) as listener:
            _serve(
                listener,
                model=model,
                host=host,
                pool=pool.value,
                ray_address=ray_address,
                num_actors=num_actors,
                backend=backend,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                parking=parking,
                mask_deadline=mask_deadline,
                mask_limit=mask_limit,
                max_replays=max_replays,
                pool_wait=pool_wait,
                actor_memory_bytes=actor_memory_mib << 20 if actor_memory_mib is not None else None,
                max_cache_bytes=grammar_cache_mib << 20,
                device=device,
                dtype=dtype,
                logits_processors=tuple(logits_processors or ()),
                api_key=api_key or None,
                served_model_name=served_model_name,
                stall_seconds=stall_seconds,
                grace_seconds=grace_seconds,
                log_level=log_level.value,
                max_requests=max_requests,
                max_waiting=max_waiting,
                max_compiling=max_compiling,
                max_n=max_n,
                compile_limits={"seconds": compile_seconds, "memory_bytes": compile_memory_mib << 20},
                limits={
                    "max_constraint_bytes": max_constraint_bytes,
                    "max_nesting": max_nesting,
                    "max_alternatives": max_alternatives,
                    "max_enum": max_enum,
                    "max_choices": max_choices,
                    "max_repetition": max_repetition,
                    "max_grammar_rules": max_grammar_rules,
                },
            )
    except OSError as error:
        _give_up(error)


def _serve(
    listener: socket.socket,
    *,
    backend: str,
    limits: dict[str, int],
    compile_limits: dict[str, Any],
    **options: Any,
) -> None:
    # Heavy (torch, transformers): not for --help.
    from engine.attention import UnsupportedModelError
    from engine.server.process import ServeOptions, serve
    from guided.backends import resolve
    from guided.errors import GuidedError
    from guided.limits import CompileLimits, Limits

    try:
        serve(
            ServeOptions(
                backend=resolve(backend, param="--backend"),
                limits=Limits(**limits),
                compile_limits=CompileLimits(**compile_limits),
                **options,
            ),
            listener,
        )
    except (ValueError, UnsupportedModelError, GuidedError) as error:
        _give_up(error)


def _give_up(error: Exception) -> NoReturn:
    """One line for what the user can mend; GUIDED_TRACEBACK=1 shows where it came from."""
    if os.environ.get("GUIDED_TRACEBACK"):
        raise error
    line = " ".join(str(error).split())
    typer.secho(f"guided serve: {line}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1) from None


def main() -> None:
    """Entry point of the console script."""
    app()
