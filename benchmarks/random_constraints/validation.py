"""Validation of a finished output against its schema, independent of `guided`.

`jsonschema` validates by the dialect of `$schema`. `jsonschema-rs` decides patterns (as
ECMA-262 reads them) and formats, for which the masks have their own expressions.
Multiples are calculated exactly. If a key is repeated, the text must be valid with the
first and with the last value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import jsonschema
import jsonschema_rs
from jsonschema.validators import extend, validator_for

FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
]
FORMATS += ["relative-json-pointer", "uri", "uri-reference", "regex", "uuid"]
"""The formats that are checked."""


@cache
def _native(keyword: str, argument: str) -> jsonschema_rs.Draft202012Validator:
    """Return the validator of one keyword."""
    return jsonschema_rs.Draft202012Validator(
        {keyword: argument}, validate_formats=True
    )


def problem(text: str, schema: Any) -> str | None:
    """Return why `text` does not satisfy `schema`, or None."""
    validator = _extended(validator_for(schema, jsonschema.Draft202012Validator))(
        schema
    )
    readers: dict[str, Callable[..., Any]] = {
        "last": dict,
        "first": lambda pairs: dict(pairs[::-1]),
    }
    for kept, reader in readers.items():
        try:
            document = json.loads(text, object_pairs_hook=reader)
        except ValueError as wrong:
            return f"not JSON: {wrong}"
        error = next(validator.iter_errors(document), None)
        if error is not None:
            return f"{error.message[:200]} (the {kept} of equal keys)"
    return None


@cache
def _extended(validator: Any) -> Any:
    checks: dict[str, Any] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "format": _format,
    }
    checks |= {"additionalProperties": _additional, "multipleOf": _multiple}
    known = {
        name: check
        for name, check in checks.items()
        if name in validator.VALIDATORS or name == "format"
    }
    return extend(validator, known)  # type: ignore[no-untyped-call]


def _errors(failed: bool, message: str) -> Iterator[jsonschema.ValidationError]:
    if failed:
        yield jsonschema.ValidationError(message)


def _pattern(
    _validator: Any, pattern: str, value: Any, _schema: Any
) -> Iterator[jsonschema.ValidationError]:
    failed = isinstance(value, str) and not _native("pattern", pattern).is_valid(value)
    yield from _errors(failed, f"{value!r} has no match of {pattern!r}")


def _pattern_properties(
    validator: Any, named: Any, value: Any, _schema: Any
) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, schema in named.items():
            for key in filter(_native("pattern", pattern).is_valid, value):
                yield from validator.descend(value[key], schema, path=key)


def _additional(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        searches = [
            _native("pattern", pattern).is_valid
            for pattern in schema.get("patternProperties", {})
        ]
        for key in set(value) - set(schema.get("properties", {})):
            if rest is not True and not any(search(key) for search in searches):
                yield from _errors(rest is False, f"{key!r} is not allowed")
                if rest is not False:
                    yield from validator.descend(value[key], rest, path=key)


def _format(
    _validator: Any, name: str, value: Any, _schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and name in FORMATS:
        yield from _errors(
            not _native("format", name).is_valid(value), f"{value!r} is no {name}"
        )


def _multiple(
    _validator: Any, multiple: Any, value: Any, _schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    ):
        rest = Fraction(str(value)) % Fraction(str(multiple))
        yield from _errors(rest != 0, f"{value} is no multiple of {multiple}")
