"""How many values a schema in normal form allows, and some of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Protocol

from guided import regex
from guided.errors import UnsupportedConstraint
from guided.schema import string_pattern
from guided.schema.form import NormalForm
from guided.schema.keywords import ALL_TYPES, NUMBER_BOUNDS, OF_TYPE, Schema, integer_bounds, kind_of, listed
from guided.schema.metaschema import identity
from guided.schema.string_language import pattern_of

MANY = 1000
"""A number of values that no output exhausts."""
_CONDITIONS = ("allOf", "oneOf", "not", "if", "dependentSchemas")
_DEPTH = 4
"""Maximum number of nested arrays that are inspected."""
_STRINGS = ("", "a", "value", "x" * 40)
_NUMBERS = (0, 1, -1, 2, 5, 10, 100, 1000, 0.5)
_FIRST = {"string": b'"', "object": b"{", "array": b"[", "boolean": b"tf", "null": b"n"}
_FIRST |= dict.fromkeys(("number", "integer"), b"-0123456789")


class Bases(Protocol):
    """Looks up subschemas."""

    @property
    def form(self) -> NormalForm:
        """The whole schema."""

    def base(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return an alternative without the guarded keywords."""


def resolved(bases: Bases, schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema without `$ref`, `anyOf` and the guarded keywords."""
    return [bases.base(one) if isinstance(one, dict) else one for one in bases.form.alternatives(schema)]


def is_known(schema: Schema) -> bool:
    """Whether an alternative is described without conditions, which could exclude any of its values."""
    return isinstance(schema, bool) or schema.keys().isdisjoint(_CONDITIONS)


def kinds(schema: Schema) -> list[str]:
    """Return the types of an alternative."""
    if isinstance(schema, bool):
        return [*ALL_TYPES] if schema else []
    if (values := listed(schema)) is not None:
        return sorted(set(map(kind_of, values)))
    named = schema.get("type", ALL_TYPES)
    return [named] if isinstance(named, str) else [*named]


def finite(bases: Bases, schema: Schema) -> list[Any] | None:
    """Return all values of a schema, if they are few and scalar; otherwise None."""
    found: list[Any] = []
    for one in resolved(bases, schema):
        values = listed(one)
        if values is None:
            for kind in kinds(one) if is_known(one) else ("any",):
                if kind == "boolean":
                    found += [False, True]
                elif kind == "null":
                    found.append(None)
                else:
                    return None
        else:
            found += values
    return None if any(isinstance(value, dict | list) for value in found) else found


def endless(bases: Bases, schema: Schema) -> frozenset[int]:
    """Return first bytes of values that can always be continued, however they began."""
    found: set[int] = set()
    closed: set[int] = set()
    for one in resolved(bases, schema):
        for kind in kinds(one):
            part = one if isinstance(one, dict) else {}
            free = is_known(one) and listed(one) is None and _is_endless(bases, part, kind)
            (found if free else closed).update(_FIRST[kind])
    return frozenset(found - closed)


def _is_endless(bases: Bases, schema: dict[str, Any], kind: str) -> bool:
    """Whether a value of a type can always be continued, however it began."""
    if kind == "string":
        return not schema.keys() & {"maxLength", "pattern", "format"}
    if kind == "object":
        is_open = schema.get("additionalProperties", True) is not False
        return is_open and not schema.keys() & {"maxProperties", "propertyNames"}
    if kind == "array":
        return _is_endless_array(bases, schema, _DEPTH)
    return kind in ("integer", "number") and not schema.keys() & {*NUMBER_BOUNDS, "multipleOf"}


def at_least(bases: Bases, schema: Schema, count: int, depth: int = _DEPTH) -> bool:
    """Whether it is certain that a schema allows `count` different values."""
    known = 0
    for one in filter(is_known, resolved(bases, schema)):
        values = listed(one)
        if values is not None:
            known = max(known, len(set(map(identity, values))))
            continue
        sizes = [_size(bases, one if isinstance(one, dict) else {}, kind, depth) for kind in kinds(one)]
        known = max(known, sum(sizes))
    return known >= count


def _is_endless_array(bases: Bases, schema: dict[str, Any], depth: int) -> bool:
    """Whether an array can always be continued, however it began. Its items may have to be unique."""
    if depth == 0 or "maxItems" in schema or not at_least(bases, schema.get("items", True), MANY, depth - 1):
        return False
    return all(at_least(bases, one, 1, depth - 1) for one in schema.get("prefixItems", ()))


def _size(bases: Bases, schema: dict[str, Any], kind: str, depth: int) -> int:
    """Return a lower bound of the number of values of a type."""
    if kind == "boolean":
        return 2
    if kind == "integer":
        low, high = integer_bounds(schema)
        if low is None or high is None:
            return MANY
        return (high - low) // max(1, int(schema.get("multipleOf", 1)))
    if kind == "number":
        return 1 if schema.keys() & {*NUMBER_BOUNDS, "multipleOf"} else MANY
    if kind == "string":
        if "pattern" in schema or "format" in schema:
            strings = {keyword: schema[keyword] for keyword in OF_TYPE["string"] if keyword in schema}
            try:
                return _language(string_pattern.read(pattern_of(strings)))
            except UnsupportedConstraint:
                return 1
        return MANY if schema.get("maxLength", 2) > 1 else 1
    if kind == "object":
        is_open = schema.get("additionalProperties", True) is not False and "propertyNames" not in schema
        return MANY if is_open and schema.get("maxProperties", 1) > len(schema.get("required", ())) else 1
    if kind == "array":
        if _is_endless_array(bases, schema, depth):
            return MANY
        least, prefix = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
        parts = [*prefix[:least], *[schema.get("items", True)] * (least > len(prefix))]
        return int(depth == 0 or all(at_least(bases, one, 1, depth - 1) for one in parts))
    return 1


def _language(node: regex.Node) -> int:
    """Return a lower bound of the number of matches of a pattern."""
    match node:
        case regex.Chars(ranges):
            return min(MANY, sum(last - first + 1 for first, last in ranges))
        case regex.Sequence(items):
            others = [_language(item) for item in items if not isinstance(item, regex.Chars)]
            single = prod(_language(item) for item in items if isinstance(item, regex.Chars))
            return min(MANY, single * max(others, default=1))
        case regex.Choice(options):
            return max(map(_language, options))
        case regex.Repeat(item, low, high):
            if high is None:
                return MANY
            one, times = _language(item), min(high, 10) if isinstance(item, regex.Chars) else 1
            return int(min(MANY, max(one**times, high - low + 1)))
    return 1


def endless_pattern(pattern: str, count: int = MANY) -> bool:
    """Whether a pattern certainly has many matches: at least `count`."""
    return _language(string_pattern.read(pattern)) >= count


def samples(bases: Bases, schema: Schema, depth: int = 3) -> Iterator[Any]:
    """Yield some values that a schema may allow. The caller checks them."""
    for one in resolved(bases, schema):
        values = listed(one)
        if values is not None:
            yield from values
            continue
        part = one if isinstance(one, dict) else {}
        for kind in kinds(one):
            yield from _of_kind(bases, part, kind, depth)


def _of_kind(bases: Bases, schema: dict[str, Any], kind: str, depth: int) -> Iterator[Any]:
    match kind:
        case "string":
            yield from _STRINGS
            yield "x" * min(int(schema.get("minLength", 0)), 1000)
            yield from ("a" * min(int(schema.get("maxLength", 3)), 3),)
        case "number" | "integer":
            step = schema.get("multipleOf", 1)
            bounds = [schema[name] for name in NUMBER_BOUNDS if name in schema]
            for base in (*(value for bound in bounds for value in (bound, bound + 1, bound - 1)), *_NUMBERS):
                yield from (base, base * step)
        case "boolean":
            yield from (True, False)
        case "null":
            yield None
        case "array":
            least = int(schema.get("minItems", 0))
            prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
            yield []
            parts = [*prefix[:least], *[rest] * (least - len(prefix))]
            if depth and 0 < least <= 20:
                yield [next(samples(bases, item, depth - 1), None) for item in parts]
        case "object":
            properties = schema.get("properties", {})
            names = schema.get("required", [])
            yield {}
            if depth:
                yield {name: next(samples(bases, properties.get(name, True), depth - 1), None) for name in names}
