"""Tables of JSON Schema keywords, and simplification of a single subschema.

Works on subschemas in the terms of the normal form (`normal_form.py`), without their applicators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil, floor
from typing import Any, TypeGuard

Schema = dict[str, Any] | bool

ALL_TYPES = ("null", "boolean", "object", "array", "number", "string")
_STRING = ("minLength", "maxLength", "pattern", "format")
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBER = (*NUMBER_BOUNDS, "multipleOf")
_ARRAY = (
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    *("contains", "minContains", "maxContains"),
)
_OBJECT = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
OF_TYPE = {"string": _STRING, "number": _NUMBER, "array": _ARRAY, "object": _OBJECT}
GREATEST = {"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"}
LEAST = {"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"}
_NO_OPS: dict[str, Any] = {
    "minLength": 0,
    "minItems": 0,
    "minProperties": 0,
    "uniqueItems": False,
    "required": [],
    "properties": {},
    "patternProperties": {},
    "prefixItems": [],
    "additionalProperties": True,
    "items": True,
    "dependentRequired": {},
    "dependentSchemas": {},
    "propertyNames": True,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types of a subschema in normal form; all if it names none. "number" includes "integer"."""
    named = schema.get("type", ALL_TYPES) if isinstance(schema, dict) else ALL_TYPES
    return frozenset([named] if isinstance(named, str) else named)


def listed(schema: Schema) -> list[Any] | None:
    """Return the values of a subschema with `enum` or `const`."""
    if isinstance(schema, bool) or not ("enum" in schema or "const" in schema):
        return None
    values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
    return values


def kind_of(value: Any) -> str:
    """Return the type of a value; "number" for integers too."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names: dict[type, str] = {str: "string", dict: "object", list: "array"}
    return names.get(type(value), "number")


def clean(schema: dict[str, Any]) -> Schema:
    """Remove keywords without effect; False if no value can satisfy the schema."""
    types = _types(schema)
    kept = dict(schema)
    for kind, keywords in OF_TYPE.items():
        if kind not in types and not (kind == "number" and "integer" in types):
            for keyword in keywords:
                kept.pop(keyword, None)
    for keyword, nothing in _NO_OPS.items():
        value = kept.get(keyword)
        if value is nothing or (nothing is True and value == {}) or (value == nothing and type(value) is type(nothing)):
            kept.pop(keyword, None)
    narrow_bounds(kept)
    if "not" in kept and (excludes := _excludes(kept["not"], types)) is not None:
        if excludes:
            return False
        del kept["not"]
    types = [kind for kind in types if _possible(kind, kept)]
    if not types:
        return False
    if "type" in kept or len(types) < len(ALL_TYPES):
        kept["type"] = types[0] if len(types) == 1 else types
    if "type" in kept and set(types) == set(ALL_TYPES):
        del kept["type"]
    if len(types) < len(_types(schema)):
        return clean(kept)
    if "contains" in kept and kept.get("minContains") == 0 and "maxContains" not in kept:
        del kept["contains"]
    return kept


COMPOUND = {"$ref", "anyOf", "oneOf", "allOf", "if", "enum", "const"}


def cleaned(schema: Schema) -> Schema:
    """`clean` for any subschema in normal form: those with applicators stay as they are."""
    return schema if isinstance(schema, bool) or schema.keys() & COMPOUND else clean(schema)


def _excludes(excluded: Schema, types: list[str]) -> bool | None:
    """Whether `not: excluded` excludes all values of `types` (True), none (False), or some (None)."""
    if isinstance(excluded, bool) or not excluded:
        return excluded is not False
    if excluded.keys() & COMPOUND:
        return None
    inner = types_of(excluded)
    if excluded.keys() <= {"type"} and all(
        kind in inner or (kind == "integer" and "number" in inner) for kind in types
    ):
        return True
    numeric = {"number", "integer"}
    overlap = any(kind in inner or (kind in numeric and inner & numeric) for kind in types)
    return None if overlap else False


def map_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of a subschema in normal form with `change` applied to each subschema directly in it."""
    if isinstance(schema, bool):
        return schema
    kept = dict(schema)
    for keyword, value in schema.items():
        if keyword in _ONE:
            kept[keyword] = change(value)
        elif keyword in _MANY:
            kept[keyword] = [change(part) for part in value]
        elif keyword in _NAMED:
            kept[keyword] = {name: change(part) for name, part in value.items()}
    return kept


def parts_of(schema: dict[str, Any]) -> Iterator[Schema]:
    """Yield the subschemas directly in a subschema in normal form."""
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield value
        elif keyword in _MANY or keyword in _NAMED:
            yield from value if keyword in _MANY else value.values()


_ONE = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
_MANY = ("prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "dependentSchemas")


def name_required(schema: Schema, copied: Callable[[Schema, Schema], None]) -> Schema:
    """Append missing required names, which have no place in the order, to `properties`: here and in all parts.

    Args:
        copied: called with each subschema and its copy.
    """
    copy = map_parts(schema, lambda part: name_required(part, copied))
    if isinstance(copy, dict) and not copy.get("patternProperties"):
        missing = [name for name in copy.get("required", ()) if name not in copy.get("properties", {})]
        if missing:
            rest = copy.get("additionalProperties", True)
            copy["properties"] = {**copy.get("properties", {}), **dict.fromkeys(missing, rest)}
    copied(schema, copy)
    return copy


def narrow_bounds(schema: dict[str, Any]) -> None:
    """Keep one bound per side: the stricter of an inclusive and an exclusive one."""
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        if inclusive in schema and exclusive in schema:
            looser = inclusive if schema[exclusive] * sign >= schema[inclusive] * sign else exclusive
            del schema[looser]


def _possible(kind: str, schema: dict[str, Any]) -> bool:
    """Whether a value of type `kind` may satisfy `schema` (False is a proof that none does)."""
    if kind == "string":
        return bool(schema.get("minLength", 0) <= schema.get("maxLength", float("inf")))
    if kind in ("number", "integer"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", float("-inf")))
        high = schema.get("maximum", schema.get("exclusiveMaximum", float("inf")))
        if kind == "integer":
            first, last = integer_bounds(schema)
            return first is None or last is None or first <= last
        strict = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
        return bool(low < high or (low == high and not strict))
    if kind == "array":
        items: list[Schema] = schema.get("prefixItems", [])
        least, most = schema.get("minItems", 0), schema.get("maxItems", float("inf"))
        forbidden = next((index for index, item in enumerate(items) if item is False), None)
        if forbidden is None and schema.get("items") is False:
            forbidden = len(items)
        return bool(least <= most and (forbidden is None or least <= forbidden))
    if kind == "object":
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
        if any(properties.get(name, rest) is False for name in schema.get("required", ())):
            return False
        most = schema.get("maxProperties", float("inf"))
        return bool(schema.get("minProperties", 0) <= most and len(schema.get("required", ())) <= most)
    return True


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the greatest integer within the bounds (None: no bound). Each side has at most one bound."""
    low = high = None
    if "minimum" in schema:
        low = ceil(schema["minimum"])
    elif "exclusiveMinimum" in schema:
        low = floor(schema["exclusiveMinimum"]) + 1
    if "maximum" in schema:
        high = floor(schema["maximum"])
    elif "exclusiveMaximum" in schema:
        high = ceil(schema["exclusiveMaximum"]) - 1
    return low, high


def divides_integers(multiple: int | float) -> bool:
    """Whether every integer is a multiple of `multiple`."""
    return (1 / Fraction(str(multiple))).denominator == 1


def _types(schema: dict[str, Any]) -> list[str]:
    named = schema.get("type", ALL_TYPES)
    found = [named] if isinstance(named, str) else [kind for kind in named if isinstance(kind, str)]
    if "any" in found:  # draft 3
        return list(ALL_TYPES)
    return [kind for kind in found if kind != "integer" or "number" not in found]


def common_types(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    mine, theirs = _types(left), _types(right)
    common = [kind for kind in mine if kind in theirs or (kind == "integer" and "number" in theirs)]
    return common + [kind for kind in theirs if kind == "integer" and "number" in mine]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number: Python's booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def all_of(*parts: Schema) -> Schema:
    """Return what all of `parts` allow."""
    if any(part is False for part in parts):
        return False
    kept = [part for part in parts if part is not True and part != {}]
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else True
