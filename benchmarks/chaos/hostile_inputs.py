"""A file of hostile inputs: each with the decision that a robust service takes, as the requests that carry it.

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
from benchmarks.report import ROOT
from guided.backends import AUTO, BACKENDS
from guided.constraint import ConstraintKind

__all__ = ["DATA", "Entry", "backends_of", "deep", "read", "requests"]

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
    """Either decision is fine, if it comes within the budget of a compilation and hurts nobody."""
    scope: Literal["spec", "request", "stream", "model-output"]
    payload: Any
    if_enforced: bool
    """To be refused, unless what it asks for is enforced."""


def read(path: Path) -> list[Entry]:
    """The file's entries. Generators are Python expressions: read only files that you trust."""
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
    """The backends that have its kind, and "auto"; "auto" alone where the request itself is at fault."""
    able = [name for name, adapter in BACKENDS.items() if entry.kind in adapter.kinds]
    return [AUTO] if entry.scope == "request" else [AUTO, *able]


def requests(entry: Entry, backend: str, most: int) -> list[Request]:
    """The requests that carry it, to be sent one after the other.

    Args:
        most: of a flood of constraints, how many are sent.
    """
    fields: list[dict[str, Any]]
    match entry.scope:
        case "request":
            fields = [entry.payload]
        case "stream":
            fields = [_spelled(entry.kind, each) for each in entry.payload[:most]]
        case "model-output":  # what the model says, whoever reads it: it has no choice here
            fields = [{"choice": [entry.payload]}]
        case _:
            fields = [{entry.kind: entry.payload}]
    basis: dict[str, Any] = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    basis["backend"] = backend
    return [Request(number, CHAT, {**basis, **each}, hostile=entry.id) for number, each in enumerate(fields)]


def _spelled(kind: ConstraintKind, payload: Any) -> dict[str, Any]:
    """One payload of several, which may say itself what it is, as vLLM's `structured_outputs` does."""
    if isinstance(payload, dict) and payload.keys() <= {"json", "grammar", "regex", "choice"}:
        return {"structured_outputs": payload}
    return {kind: payload}


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Some are nested too deep for Python's usual limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(DEPTH)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
