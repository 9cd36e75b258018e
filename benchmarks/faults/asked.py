"""What is asked of an engine in every run: one request that is to be the victim of a fault, beside eight that are not.

Imports nothing that vLLM's environment lacks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from benchmarks.faults.faulty_matcher import MARK

__all__ = ["Answer", "Asked", "bystanders", "is_valid", "next_requests", "victim"]

PROMPT = "Text: Maria Keller is 34 years old and lives in Lisbon.\nJSON: "
ORDINARY = "ordinary_field"
ERROR_STATE = 'start: /[a-f]{60}/ "<" s ">"\ns: s s s | s s | /[a-z]/ | /[a-c]+/'
"""llguidance is over its own limits at the first mask after the `<`, and in its error state from then on. No fault is
injected. No text without the `>` is in the language."""
COSTLY = 'start: "<" s ">"\ns: /[a-f]/ | s s | s s s | s s s s'
"""Every mask costs llguidance more than the one before, up to a second at 100 tokens. No fault is injected."""
UNAMBIGUOUS = 'start: /[a-f]{60}/ "<" /[a-f]{60}/ ">"'
COSTLY_TOKENS = 60
PLAIN_TOKENS = 160


@dataclass(frozen=True)
class Asked:
    """One request, as both engines get it."""

    name: str
    max_tokens: int
    constraint: dict[str, Any] = field(default_factory=dict)
    """At most one of `json`, `regex`, `grammar`."""


@dataclass
class Answer:
    """What became of it."""

    name: str
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    hung: bool = False
    seconds: float = 0.0
    longest_gap: float = 0.0
    """Seconds between two outputs, at the most."""


def _people(name: str, count: int) -> dict[str, Any]:
    person = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0}},
        "required": [name, "age"],
        "additionalProperties": False,
    }
    person["properties"]["age"]["maximum"] = 99  # type: ignore[index]
    return {"type": "array", "minItems": count, "maxItems": count, "items": person}


def victim(fault: str, marked: bool) -> Asked:
    """The request that the fault is for; not `marked`: its like, without the fault."""
    if fault == "error state":
        return Asked("victim", 400, {"grammar": ERROR_STATE if marked else UNAMBIGUOUS})
    if fault == "costly grammar":
        return Asked("victim", COSTLY_TOKENS, {"grammar": COSTLY if marked else UNAMBIGUOUS})
    return Asked("victim", 400, {"json": _people(MARK if marked else ORDINARY, 4)})


def bystanders() -> list[Asked]:
    """Four with a JSON Schema, two with a regex, two without a constraint: 100 to 200 tokens each."""
    schemas = [Asked(f"schema {index}", 600, {"json": _people(f"name_{index}", 9)}) for index in range(4)]
    regexes = [Asked(f"regex {index}", 600, {"regex": f"{index}: [a-z ]{{300}}\\."}) for index in range(2)]
    return [*schemas, *regexes, *(Asked(f"plain {index}", PLAIN_TOKENS) for index in range(2))]


def next_requests() -> list[Asked]:
    """Those that come after the fault."""
    return [Asked("plain", 20), Asked("schema", 200, {"json": _people("name", 2)})]


def is_valid(asked: Asked, answer: Answer) -> bool:
    """It is complete, and it is what was asked for."""
    if answer.hung or answer.error is not None:
        return False
    (kind, source) = next(iter(asked.constraint.items()), ("", None))
    if not kind or source == COSTLY:  # it may go on for ever
        return answer.finish_reason == "length" and answer.tokens == asked.max_tokens
    if answer.finish_reason != "stop":
        return False
    if kind == "json":
        try:
            return jsonschema.Draft202012Validator(source).is_valid(json.loads(answer.text))
        except ValueError:
            return False
    return re.fullmatch(r"[a-f]{60}<[a-z]+>" if kind == "grammar" else source, answer.text) is not None
