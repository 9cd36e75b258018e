"""The requests of every run: one that gets the fault (the victim), and eight others. Imports only what vLLM's
environment has."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from benchmarks.faults.faulty_matcher import MARK

PROMPT = "Text: Maria Keller is 34 years old and lives in Lisbon.\nJSON: "
ORDINARY = "ordinary_field"
ERROR_STATE = 'start: /[a-f]{60}/ "<" s ">"\ns: s s s | s s | /[a-z]/ | /[a-c]+/'
"""llguidance exceeds its own limits at the first mask after the `<` and stays in its error state. No fault is injected.
Every text of the language has the `>`."""
COSTLY = 'start: "<" s ">"\ns: /[a-f]/ | s s | s s s | s s s s'
"""Each mask takes llguidance longer than the one before, up to a second at 100 tokens. No fault is injected."""
SLOW_TO_COMPILE = "[ab]*a[ab]{25}"
"""outlines-core takes more than 10 s and all the memory that it is allowed. No fault is injected."""
UNAMBIGUOUS = 'start: /[a-f]{60}/ "<" /[a-f]{60}/ ">"'
COSTLY_TOKENS = 60
PLAIN_TOKENS = 160


@dataclass(frozen=True)
class Request:
    """One request in the form that both engines get."""

    name: str
    max_tokens: int
    constraint: dict[str, Any] = field(default_factory=dict)
    """At most one of `json`, `regex`, `grammar`."""
    backend: str = ""
    """The backend, if it is not llguidance."""


@dataclass
class Answer:
    """The result of one request."""

    name: str
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    hung: bool = False
    seconds: float = 0.0
    longest_gap: float = 0.0
    """Maximum seconds between two outputs."""


def _people(name: str, count: int) -> dict[str, Any]:
    person = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0}},
        "required": [name, "age"],
        "additionalProperties": False,
    }
    person["properties"]["age"]["maximum"] = 99  # type: ignore[index]
    return {"type": "array", "minItems": count, "maxItems": count, "items": person}


def victim(fault: str, marked: bool) -> Request:
    """Return the request that gets the fault, or, if not `marked`, a similar request without it."""
    if fault == "error state":
        return Request("victim", 400, {"grammar": ERROR_STATE if marked else UNAMBIGUOUS})
    if fault == "costly grammar":
        return Request("victim", COSTLY_TOKENS, {"grammar": COSTLY if marked else UNAMBIGUOUS})
    if fault == "slow compile":
        return Request("victim", 100, {"regex": SLOW_TO_COMPILE if marked else "[ab]{30}"}, "outlines")
    return Request("victim", 400, {"json": _people(MARK if marked else ORDINARY, 4)})


def bystanders() -> list[Request]:
    """Return four requests with a JSON Schema, two with a regex, two without a constraint: 100 to 200 tokens each."""
    schemas = [Request(f"schema {index}", 600, {"json": _people(f"name_{index}", 9)}) for index in range(4)]
    regexes = [Request(f"regex {index}", 600, {"regex": f"{index}: [a-z ]{{300}}\\."}) for index in range(2)]
    return [*schemas, *regexes, *(Request(f"plain {index}", PLAIN_TOKENS) for index in range(2))]


def next_requests() -> list[Request]:
    """Return the requests that are sent after the fault."""
    return [Request("plain", 20), Request("schema", 200, {"json": _people("name", 2)})]


def is_valid(request: Request, answer: Answer) -> bool:
    """Return whether the answer is complete and satisfies the request's constraint."""
    if answer.hung or answer.error is not None:
        return False
    source: Any
    kind, source = next(iter(request.constraint.items()), ("", None))
    if not kind or source == COSTLY:  # its text has no end
        return answer.finish_reason == "length" and answer.tokens == request.max_tokens
    if answer.finish_reason != "stop":
        return False
    if kind == "json":
        try:
            return jsonschema.Draft202012Validator(source).is_valid(json.loads(answer.text))
        except ValueError:
            return False
    return re.fullmatch(r"[a-f]{60}<[a-z]+>" if kind == "grammar" else source, answer.text) is not None
