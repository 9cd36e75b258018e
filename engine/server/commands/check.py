"""`guided check`: prints what `guided.check` reports."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
import yaml

from engine.default_model import checkpoint_path
from engine.server.commands.parameters import reported
from guided.backends import AUTO, resolve

if TYPE_CHECKING:
    from guided.check.check import Report


def check(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files to check; - is standard input.", allow_dash=True),
    ],
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="tokenizer.json, tekken.json, or a model's folder. Masks depend on it. Default: the embedded model's.",
            exists=True,
            default_factory=checkpoint_path,
            show_default=False,
        ),
    ],
    kind: Annotated[
        Literal["json_schema", "regex", "grammar"] | None,
        typer.Option(
            help="What the files contain. Default: by name (.json, .yaml, .regex, .lark, .gbnf) or text."
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="The grammar backend, or auto.")] = AUTO,
    close_objects: Annotated[
        bool,
        typer.Option(
            "--close-objects",
            help="Exclude properties that a schema does not name, as a server does.",
        ),
    ] = False,
    samples: Annotated[
        int, typer.Option(help="Random valid outputs to print for each.", min=0)
    ] = 0,
    seconds: Annotated[
        float, typer.Option(help="Time limit for each file.", min=0)
    ] = 30.0,
    seed: Annotated[int, typer.Option(help="Random seed of the samples.")] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Treat parts of a schema that are not enforced as errors."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each file.")
    ] = False,
) -> None:
    """Check JSON schemas, regexes and grammars without a model: accepted or refused, by
    which backend, and why.

    The exit status is 1 if a file is refused, 2 if one can't be read or for a wrong
    call.
    """
    texts = []
    for file in files:
        try:
            texts.append((str(file), _text_of(file)))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            unread = {
                "name": str(file),
                "accepted": False,
                "error": f"can't be read: {reason}",
            }
            line = f"{file}: {unread['error']}"
            if as_json:
                line = json.dumps(unread, ensure_ascii=False)
            print(line, flush=True)
    all_read = len(texts) == len(files)
    if not texts:
        raise typer.Exit(2)
    good = True
    open_objects = None
    if close_objects:
        open_objects = False
    with reported("check", 2):
        backend = resolve(backend)
        # slow: the grammar libraries
        from guided.check.check import check_all, vocabulary_of

        for report in check_all(
            texts,
            vocabulary_of(tokenizer),
            kind=kind,
            backend=backend,
            open_objects=open_objects,
            samples=samples,
            seed=seed,
            seconds=seconds,
        ):
            good = good and report.accepted and not (strict and report.not_enforced)
            line = _lines(report)
            if as_json:
                line = json.dumps(asdict(report), ensure_ascii=False)
            print(line, flush=True)
    if not all_read:
        raise typer.Exit(2)
    raise typer.Exit(not good)


def _text_of(file: Path) -> str:
    """Read a file. Convert YAML to JSON."""
    if str(file) == "-":
        return sys.stdin.read()
    text = file.read_text(encoding="utf-8")
    if file.suffix.lower() not in (".yaml", ".yml"):
        return text
    try:
        return json.dumps(yaml.safe_load(text))
    except (yaml.YAMLError, TypeError) as error:  # a date raises a TypeError
        raise ValueError(f"it is not JSON as YAML: {error}") from None


def _lines(report: Report) -> str:
    if report.accepted:
        lines = [
            f"{report.name}: accepted ({report.kind}), {report.backend}, {1000 * report.compile_seconds:.1f} ms"
        ]
        if report.understood:
            lines += [f"  allows: {report.understood}"]
        lines += [f"  not {name}: {reason}" for name, reason in report.refusals.items()]
    else:
        where = ""
        if report.pointer is not None:
            where = f" at {report.pointer or 'the root'}"
        lines = [f"{report.name}: refused ({report.kind}){where}: {report.error}"]
    if report.checked:
        lines.append(f"  checked: {', '.join(report.checked)}")
    lines += [
        f"  WARNING: not enforced: {part.strip()}" for part in report.not_enforced
    ]
    if report.least_tokens is not None:
        lines.append(f"  shortest output: {report.least_tokens} tokens")
    return "\n".join([*lines, *(f"  sample: {sample}" for sample in report.samples)])
