"""The keywords of two subschemas in normal form, merged: what both allow.

`enum`, `const` and applicators to the same value are not among them (`combination.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import lcm
from typing import Any

from guided.errors import InvalidConstraint
from guided.schema import string_pattern
from guided.schema.definitions import Inexact
from guided.schema.implication import same
from guided.schema.keywords import GREATEST, LEAST, Schema, common_types

Merge = Callable[[Schema, Schema], Schema]
_DECLARATIONS = ("properties", "patternProperties", "additionalProperties")
_CONDITIONS = ("if", "then", "else")


def intersection(left: dict[str, Any], right: dict[str, Any], merge: Merge) -> dict[str, Any]:
    """Return keywords that allow what `left` and `right` both do. The properties of `left` come first.

    Args:
        merge: merges two subschemas of a part.

    Raises:
        Inexact: the keywords can't express it.
    """
    merged = _objects(left, right, merge) | _arrays(left, right, merge)
    done = {*_DECLARATIONS, "items", "prefixItems"}
    for keyword in [name for name in {**left, **right} if name not in done]:
        if keyword in left and keyword in right and not same(left[keyword], right[keyword]):
            merged[keyword] = _both(keyword, left, right, merge)
        elif keyword in _CONDITIONS and "if" in left and "if" in right:
            raise Inexact
        else:
            merged[keyword] = left.get(keyword, right.get(keyword))
    return merged


def _both(keyword: str, left: dict[str, Any], right: dict[str, Any], merge: Merge) -> Any:
    """Return the value of a keyword that both subschemas have."""
    one, other = left[keyword], right[keyword]
    if keyword in GREATEST or keyword in LEAST:
        return max(one, other) if keyword in GREATEST else min(one, other)
    if keyword == "multipleOf" and isinstance(one, int) and isinstance(other, int):
        return lcm(one, other)
    match keyword:
        case "type":
            return common_types(left, right)
        case "required":
            return [*one, *(name for name in other if name not in one)]
        case "uniqueItems":
            return one or other
        case "propertyNames":
            return merge(one, other)
        case "not":
            return _any_excluded(one, other)
        case "dependentSchemas":
            return {name: merge(one.get(name, True), other.get(name, True)) for name in {**one, **other}}
    raise Inexact


def described(schema: dict[str, Any], name: str) -> Schema:
    """Return the schema for the property `name`, apart from `patternProperties`. Raises `Inexact`."""
    declared: dict[str, Schema] = schema.get("properties", {})
    if name in declared:
        return declared[name]
    try:
        matched = any(string_pattern.matches(pattern, name) for pattern in schema.get("patternProperties", ()))
    except InvalidConstraint:
        raise Inexact from None
    value: Schema = True if matched else schema.get("additionalProperties", True)
    return value


def _objects(left: dict[str, Any], right: dict[str, Any], merge: Merge) -> dict[str, Any]:
    if not (set(_DECLARATIONS) & left.keys() and set(_DECLARATIONS) & right.keys()):
        return {name: source[name] for source in (left, right) for name in _DECLARATIONS if name in source}
    mine, theirs = left.get("patternProperties", {}), right.get("patternProperties", {})
    open_ended = all(side.get("additionalProperties", True) is True for side in (left, right))
    if (mine or theirs) and not open_ended and mine != theirs:
        mine, theirs = _closed_patterns(left, right, merge), {}
    named = {**left.get("properties", {}), **right.get("properties", {})}
    rest = [side.get("additionalProperties", True) for side in (left, right)]
    return {
        "properties": {name: merge(described(left, name), described(right, name)) for name in named},
        "patternProperties": mine | {key: merge(mine.get(key, True), part) for key, part in theirs.items()},
        "additionalProperties": merge(rest[0], rest[1]),
    }


def _closed_patterns(left: dict[str, Any], right: dict[str, Any], merge: Merge) -> dict[str, Schema]:
    """Return the `patternProperties` of both, where only one has any: its names are additional for the other."""
    patterned, other = (left, right) if left.get("patternProperties") else (right, left)
    if other.get("patternProperties"):
        raise Inexact
    rest = other.get("additionalProperties", True)
    for name in other.get("properties", {}):
        if described({**patterned, "properties": {}, "additionalProperties": False}, name) is True:
            raise Inexact  # the pattern's schema would get `rest` as well
    return {key: merge(value, rest) for key, value in patterned["patternProperties"].items()}


def _arrays(left: dict[str, Any], right: dict[str, Any], merge: Merge) -> dict[str, Any]:
    mine, theirs = left.get("items", True), right.get("items", True)
    pairs = zip_longest(left.get("prefixItems", []), right.get("prefixItems", []))
    prefix = [merge(mine if one is None else one, theirs if other is None else other) for one, other in pairs]
    return {"prefixItems": prefix, "items": merge(mine, theirs)}


def _any_excluded(one: Schema, other: Schema) -> Schema:
    """Return what two `not` exclude together."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys() == {"enum"}:
        return {"enum": [*one["enum"], *other["enum"]]}
    parts = [part["anyOf"] if isinstance(part, dict) and "anyOf" in part else [part] for part in (one, other)]
    return {"anyOf": [*parts[0], *parts[1]]}
