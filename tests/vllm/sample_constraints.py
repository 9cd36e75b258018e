"""Constraints of every kind for requests to vLLM, and checks of their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

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
NUMBERS = r"<[0-9]{1,4}(,[0-9]{1,4})?>"
LARK = 'start: "<" NUMBER ("," NUMBER)? ">"\nNUMBER: /[0-9]{1,4}/'
TAG = {
    "type": "tag",
    "begin": "<person>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</person>",
}


@dataclass(frozen=True)
class Wanted:
    """Fields of a request body, and a check of its output."""

    name: str
    fields: dict[str, Any]
    is_valid: Callable[[str], bool]


def satisfies(schema: dict[str, Any]) -> Callable[[str], bool]:
    def is_valid(text: str) -> bool:
        try:
            return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        except ValueError:
            return False

    return is_valid


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def own(
    name: str,
    is_valid: Callable[[str], bool],
    backend: str | None = None,
    **outputs: Any,
) -> Wanted:
    """A request with these `structured_outputs`."""
    extra = {} if backend is None else {"vllm_xargs": {"guided_backend": backend}}
    return Wanted(name, {"structured_outputs": outputs, **extra}, is_valid)


def regex(pattern: str, backend: str | None = None) -> Wanted:
    return own(f"regex {pattern}", matches(pattern), backend, regex=pattern)


KINDS = [
    own("schema", satisfies(SCHEMA), json=SCHEMA, disable_any_whitespace=True),
    regex(DATE),
    own("choice", CITIES.__contains__, choice=CITIES),
    own("lark", matches(NUMBERS), grammar=LARK),
    own(
        "structural tag",
        lambda text: satisfies(SCHEMA)(
            text.removeprefix("<person>").removesuffix("</person>")
        ),
        structural_tag=json.dumps({"type": "structural_tag", "format": TAG}),
    ),
    Wanted(
        "response_format",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            }
        },
        satisfies(SCHEMA),
    ),
]
BACKENDS = [
    one
    for backend in ("guidance", "xgrammar", "outlines", "lm-format-enforcer")
    for one in (
        own(f"schema {backend}", satisfies(SMALL), backend, json=SMALL),
        regex(DATE, backend),
    )
    if one.name.startswith("schema") or backend != "lm-format-enforcer"
]
LONG = regex("[a-z ]{350}")
