"""Validation of the values that a schema lists (`enum`, `const`): `jsonschema` with our patterns and formats.

The package searches patterns with Python's `re` (its `\\d` and `$` are not those of ECMA-262), ignores `format`, and
divides doubles for `multipleOf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

from jsonschema import ValidationError
from jsonschema.validators import extend

from guided.errors import bounded
from guided.schema import string_pattern
from guided.schema.keywords import is_number


@cache
def enforcing(validator: Any) -> Any:
    """Return a validator class that reads `pattern` as ECMA-262 does, enforces `format`, and does not round.

    Args:
        validator: a class of the `jsonschema` package.
    """
    checks: dict[str, Any] = {"pattern": _pattern, "format": _format, "multipleOf": _multiple, "divisibleBy": _multiple}
    checks |= {"patternProperties": _pattern_properties, "additionalProperties": _additional_properties}
    known = {name: check for name, check in checks.items() if name in validator.VALIDATORS}
    return extend(validator, known)  # type: ignore[no-untyped-call]


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not string_pattern.matches(pattern, instance):
        yield ValidationError(f"{bounded(instance)!r} does not match {bounded(pattern)!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        for pattern in patterns:
            if string_pattern.matches(pattern, name):
                yield from validator.descend(value, patterns[pattern], path=name)


def _additional_properties(validator: Any, others: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if name not in named and not any(string_pattern.matches(pattern, name) for pattern in patterns):
            yield from validator.descend(value, others, path=name)


def _multiple(_validator: Any, step: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    number = is_number(instance)
    if number and Fraction(str(instance)) % Fraction(str(step)):
        yield ValidationError(f"{bounded(instance)} is not a multiple of {bounded(step)}")


def _format(_validator: Any, name: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    pattern = string_pattern.FORMATS.get(name)
    if pattern is not None and isinstance(instance, str) and not string_pattern.matches(pattern, instance):
        yield ValidationError(f"{bounded(instance)!r} is not a {name!r}")
