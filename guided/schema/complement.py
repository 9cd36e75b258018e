"""The complement of a subschema in normal form. It replaces `not`, `if` and overlapping `oneOf`.

The complement of one condition is a positive schema where JSON Schema has one: of `required`, a property that is
false; of `minimum`, an `exclusiveMaximum`. Other conditions stay under `not`, each alone beside its type: merged with
what stands next to them, most of these alternatives disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from guided.schema.keywords import ALL_TYPES, OF_TYPE, Schema, kind_of, listed, types_of

_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_NUMBERS = 8


def violations(schema: dict[str, Any], complement: Callable[[Schema], Schema]) -> Iterator[Schema]:
    """Yield schemas that together allow exactly the values that `schema` does not.

    Args:
        schema: keywords of values, or `enum` or `const`; without `$ref`, `anyOf`, `oneOf`, `allOf` and `if`.
        complement: returns the complement of the subschema of a part.
    """
    if (values := listed(schema)) is not None:
        yield from _other_values(values, complement)
        return
    types = types_of(schema)
    others = [kind for kind in ALL_TYPES if kind not in types and not (kind == "number" and "integer" in types)]
    if others:
        yield {"type": others}
    if "integer" in types:
        yield {"type": "number", "not": {"type": "integer"}}
    if "not" in schema:
        yield schema["not"]
    for kind in sorted(types):
        for keyword in OF_TYPE.get("number" if kind == "integer" else kind, ()):
            if keyword in schema:
                for violation in _violations(keyword, schema, complement):
                    yield {"type": kind, **violation}


def _violations(
    keyword: str, schema: dict[str, Any], complement: Callable[[Schema], Schema]
) -> Iterator[dict[str, Any]]:
    """Yield the ways to violate one keyword, as other keywords of the same type."""
    value = schema[keyword]
    if keyword in _OPPOSITES:
        yield {_OPPOSITES[keyword]: value}
    elif keyword in _COUNTS and (value or not keyword.startswith("min")):
        least = keyword.startswith("min")
        yield {("max" if least else "min") + keyword[3:]: int(value) - 1 if least else int(value) + 1}
    elif keyword == "required":
        for name in value:
            yield {"properties": {name: False}}
    elif keyword == "properties":
        for name, part in value.items():
            yield {"properties": {name: complement(part)}, "required": [name]}
    elif keyword == "prefixItems":
        for index, part in enumerate(value):
            yield {"prefixItems": [True] * index + [complement(part)], "minItems": index + 1}
    elif keyword == "items":
        count = len(schema.get("prefixItems", ()))
        if value is False:
            yield {"minItems": count + 1}
        elif count:
            yield {"not": {"prefixItems": [True] * count, "items": value}}
        else:
            yield {"contains": complement(value)}
    elif keyword == "contains":
        if schema.keys() & {"minContains", "maxContains"}:
            yield {"not": {name: schema[name] for name in (keyword, "minContains", "maxContains") if name in schema}}
        else:
            yield {"items": complement(value)}
    elif keyword == "patternProperties":
        yield {"not": {keyword: value}}
    elif keyword == "additionalProperties":
        patterns = dict.fromkeys(schema.get("patternProperties", ()), True)
        names = dict.fromkeys(schema.get("properties", ()), True)
        yield {"not": {"properties": names, "patternProperties": patterns, keyword: value}}
    elif keyword not in ("minContains", "maxContains", *_COUNTS):
        yield {"not": {keyword: value}}


def only_closes(schema: Schema) -> bool:
    """Whether `schema` says only which properties an object may have."""
    return (
        isinstance(schema, dict)
        and schema.keys() == {"properties", "patternProperties", "additionalProperties"}
        and not schema["patternProperties"]
        and schema["additionalProperties"] is False
    )


def _other_values(values: list[Any], complement: Callable[[Schema], Schema]) -> Iterator[Schema]:
    """Yield schemas that together allow every value but `values`."""
    kinds: dict[str, list[Any]] = {kind: [] for kind in ALL_TYPES}
    for value in values:
        kinds[kind_of(value)].append(value)
    unlisted = [kind for kind, listed in kinds.items() if not listed]
    if unlisted:
        yield {"type": unlisted}
    if len(set(kinds["boolean"])) == 1:
        yield {"enum": [not kinds["boolean"][0]]}
    if kinds["string"]:
        yield {"type": "string", "not": {"enum": kinds["string"]}}
    if 0 < len(kinds["number"]) <= _MAX_NUMBERS:
        numbers = sorted(set(kinds["number"]))
        for low, high in zip([None, *numbers], [*numbers, None], strict=True):
            above = {} if low is None else {"exclusiveMinimum": low}
            below = {} if high is None else {"exclusiveMaximum": high}
            yield {"type": "number", **above, **below}
    elif kinds["number"]:
        yield {"type": "number", "not": {"enum": kinds["number"]}}
    for kind in ("array", "object"):
        if len(kinds[kind]) == 1:
            described = _described(kinds[kind][0])
            for keyword in described:
                for violation in _violations(keyword, described, complement):
                    yield {"type": kind, **violation}
        elif kinds[kind]:
            yield {"type": kind, "not": {"enum": kinds[kind]}}


def _described(value: Any) -> dict[str, Any]:
    """Return the keywords that only `value`, an array or an object, satisfies."""
    if isinstance(value, list):
        return {"prefixItems": [{"const": item} for item in value], "minItems": len(value), "items": False}
    named = {name: {"const": member} for name, member in value.items()}
    return {"properties": named, "required": list(value), "additionalProperties": False}
