"""Constraints of every kind for requests to vLLM, and checks of their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from guided.integrations.vllm.error_reports import REQUEST_ID

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "tag": {"enum": ["a", "b"]}},
    "required": ["ok", "tag"],
    "additionalProperties": False,
}
"""Every backend enforces all of it."""
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CITIES = ["Lisbon", "Kyoto", "São Paulo"]
LARK = 'start: "<" NUMBER ("," NUMBER)? ">"\nNUMBER: /[0-9]{1,4}/'
GBNF = 'root ::= "<" number ("," number)? ">"\nnumber ::= [0-9] [0-9]? [0-9]?'


@dataclass(frozen=True)
class Wanted:
    """A constraint in the form of `extra_args` and `vllm_xargs`."""

    name: str
    extra: dict[str, Any]
    is_valid: Callable[[str], bool]

    def params(self, request_id: str = "", **sampling: Any) -> Any:
        """Return vLLM's sampling parameters."""
        from vllm import SamplingParams

        extra = {**self.extra, REQUEST_ID: request_id} if request_id else self.extra
        usual = {
            "max_tokens": 300,
            "temperature": 1.0,
            "ignore_eos": not self.extra,
        }  # unconstrained outputs would end at random
        return SamplingParams(**{**usual, **sampling}, extra_args=extra or None)


def satisfies(schema: dict[str, Any]) -> Callable[[str], bool]:
    def is_valid(text: str) -> bool:
        try:
            return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        except ValueError:
            return False

    return is_valid


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def regex(pattern: str, **extra: Any) -> Wanted:
    return Wanted(f"regex {pattern}", {"regex": pattern, **extra}, matches(pattern))


_NUMBERS = r"<[0-9]{1,4}(,[0-9]{1,4})?>"
KINDS = [
    Wanted("schema", {"json_schema": json.dumps(SCHEMA), "whitespace_pattern": ""}, satisfies(SCHEMA)),
    regex(DATE),
    Wanted("choice", {"choice": CITIES}, CITIES.__contains__),
    Wanted("lark", {"grammar": LARK}, matches(_NUMBERS)),
    Wanted("gbnf", {"grammar": GBNF}, matches(_NUMBERS)),
]
BACKENDS = [
    Wanted(f"{kind} {backend}", {**extra, "backend": backend}, is_valid)
    for backend in ("llguidance", "xgrammar", "outlines", "lm-format-enforcer")
    for kind, extra, is_valid in [
        ("schema", {"json_schema": json.dumps(SMALL)}, satisfies(SMALL)),
        ("regex", {"regex": DATE}, matches(DATE)),
    ]
    if (kind, backend) != ("regex", "lm-format-enforcer")
]
PLAIN = Wanted("plain", {}, lambda text: True)
LONG = regex("[a-z ]{350}")
