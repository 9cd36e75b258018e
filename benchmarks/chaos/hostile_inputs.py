"""Read a file of hostile inputs with their expected decisions, and make requests of them.

The file is JSON: `{"entries": [{"id", "kind", "expected", "bounded", "scope", "payload" | "generator_py", ...}]}`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.chaos.traffic import CHAT, Request
from benchmarks.paths import ROOT
from guided.backends import AUTO, BACKENDS
from guided.constraint import ConstraintKind

DATA = ROOT.parent / "shared" / "data" / "hostile-inputs.json"
DEPTH = 100_000
MESSAGES = [{"role": "user", "content": "Ada Reed is 8 years old and lives in York. Answer."}]
MAX_TOKENS = 48


@dataclass(frozen=True)
class Entry:
    """One hostile input."""

    id: str
    kind: ConstraintKind
    expected: Literal["accept", "reject"]
    bounded: bool
    """Both decisions are correct, within the time budget of a compilation and without effect on other requests."""
    scope: Literal["spec", "request", "stream", "model-output"]
    payload: Any
    if_enforced: bool
    """Must be rejected unless the backend enforces it."""


def read(path: Path) -> list[Entry]:
    """Read the entries. Generators are Python expressions: read only files that you trust."""
    with deep():
        return [_entry(each) for each in json.loads(path.read_text())["entries"]]


def _entry(fields: dict[str, Any]) -> Entry:
    payload = fields.get("payload")
    if "generator_py" in fields:
        modules = {"functools": functools, "itertools": itertools, "json": json, "random": random}
        payload = eval(fields["generator_py"], modules)
    named = {name: fields[name] for name in ("id", "kind", "expected", "bounded", "scope")}
    return Entry(**named, payload=payload, if_enforced="silent acceptance" in fields.get("note", ""))


def backends_of(entry: Entry) -> list[str]:
    """Return "auto" and the backends that support the entry's kind, or only "auto" if the request itself is invalid."""
    able = [name for name, adapter in BACKENDS.items() if entry.kind in adapter.kinds]
    return [AUTO] if entry.scope == "request" else [AUTO, *able]


def requests(entry: Entry, backend: str, most: int) -> list[Request]:
    """Return the entry's requests, which are sent one after the other.

    Args:
        most: maximum number of requests for an entry that is a stream of constraints.
    """
    fields: list[dict[str, Any]]
    match entry.scope:
        case "request":
            fields = [entry.payload]
        case "stream":
            fields = [_fields(entry.kind, each) for each in entry.payload[:most]]
        case "model-output":  # the payload is the model's output: a choice with one option forces it
            fields = [{"choice": [entry.payload]}]
        case _:
            fields = [{entry.kind: entry.payload}]
    basis: dict[str, Any] = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    basis["backend"] = backend
    return [Request(number, CHAT, {**basis, **each}, hostile=entry.id) for number, each in enumerate(fields)]


def _fields(kind: ConstraintKind, payload: Any) -> dict[str, Any]:
    """Return the request fields of one payload of a stream. It may be a `structured_outputs` value."""
    if isinstance(payload, dict) and payload.keys() <= {"json", "grammar", "regex", "choice"}:
        return {"structured_outputs": payload}
    return {kind: payload}


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Raise Python's recursion limit, because some inputs are nested deeper."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(DEPTH)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
