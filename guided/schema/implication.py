"""Whether one subschema in normal form allows everything that another one does, as far as their keywords show it."""

from __future__ import annotations

import json
from typing import Any

from guided.schema.keywords import COMPOUND, GREATEST, LEAST, OF_TYPE, Schema, types_of


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal, with members in the same order. (In Python, 1 equals true.)"""
    return left is right or (left == right and json.dumps(left) == json.dumps(right))


def covers(general: Schema, specific: Schema) -> bool:
    """Whether every value that `specific` allows satisfies `general`. False may also mean that it isn't known."""
    if specific is False or general is True or general == {} or same(general, specific):
        return True
    if isinstance(general, bool) or isinstance(specific, bool):
        return False
    if "anyOf" in specific:
        return all(covers(general, part) for part in specific["anyOf"])
    for keyword, combine in (("anyOf", any), ("allOf", all)):
        if keyword in general:
            return combine(covers(part, specific) for part in general[keyword])
    if "allOf" in specific:
        return any(covers(general, part) for part in specific["allOf"])
    if general.keys() & COMPOUND or specific.keys() & COMPOUND:
        return False
    types = types_of(specific)
    if not all(kind in types_of(general) or (kind == "integer" and "number" in types_of(general)) for kind in types):
        return False
    kinds = {"number" if kind == "integer" else kind for kind in types}
    concerned = ["not", *(keyword for kind in kinds for keyword in OF_TYPE.get(kind, ()))]
    return all(_covers_keyword(keyword, general, specific) for keyword in concerned if keyword in general)


def _covers_keyword(keyword: str, general: dict[str, Any], specific: dict[str, Any]) -> bool:
    value, other = general[keyword], specific.get(keyword)
    if keyword in GREATEST or keyword in LEAST:
        return other is not None and (other >= value if keyword in GREATEST else other <= value)
    if keyword == "required":
        return set(value) <= set(other or ())
    if keyword == "not":
        return other is not None and covers(other, value)
    if keyword == "items" and "prefixItems" not in general and "prefixItems" not in specific:
        return covers(value, True if other is None else other)
    if keyword in ("properties", "additionalProperties") and not specific.get("patternProperties"):
        named, rest = specific.get("properties", {}), specific.get("additionalProperties", True)
        if keyword == "properties":
            return all(covers(part, named.get(name, rest)) for name, part in value.items())
        beyond = [part for name, part in named.items() if name not in general.get("properties", {})]
        return not general.get("patternProperties") and all(covers(value, part) for part in [rest, *beyond])
    return other is not None and same(value, other)
