"""The keywords of one subschema itself, of any draft, in the terms of draft 2020-12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guided.schema import string_pattern
from guided.schema.keywords import OF_TYPE, Schema, clean
from guided.schema.metaschema import Dialect

_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_ONE = ("additionalProperties", "propertyNames", "contains")
_NAMED = ("properties", "patternProperties")
_VALUES = {keyword for keywords in OF_TYPE.values() for keyword in keywords} - {
    *("items", "prefixItems", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas")
}
"""Keywords that stay as they are. (The others are read by `normal_form.py`, or below.)"""


LATER = ("prefixItems", "minContains", "maxContains")
"""Keywords that are ignored in drafts that do not have them: a value that they allow may violate the draft's own."""


def own_keywords(schema: dict[str, Any], normal: Callable[[Any], Schema], dialect: Dialect) -> Schema:
    """Return the keywords of `schema` without applicators to the same value, finite values and annotations.

    Args:
        normal: returns the normal form of a subschema.
    """
    is_draft3 = dialect.is_draft3
    schema = {keyword: value for keyword, value in schema.items() if keyword not in LATER or dialect.knows(keyword)}
    own: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "type":
            own |= {} if has_schema(value) else {"type": value}
        elif keyword in _EXCLUSIVE:  # a number, or up to draft 4 beside a boolean
            exclusive = _EXCLUSIVE[keyword]
            own[exclusive if schema.get(exclusive) is True else keyword] = value
        elif keyword in ("exclusiveMinimum", "exclusiveMaximum", "required") and isinstance(value, bool):
            continue  # up to draft 4 and draft 3: see above and below
        elif keyword == "format":
            own |= {keyword: value} if value in string_pattern.FORMATS else {}
        elif keyword in _NAMED:
            own[keyword] = {key: normal(child) for key, child in value.items()}
        elif keyword in _ONE:
            own[keyword] = normal(value)
        elif keyword == "divisibleBy" and is_draft3:
            own["multipleOf"] = value
        elif keyword in _VALUES:
            own[keyword] = value
    if is_draft3:
        named = schema.get("properties", {}).items()
        own["required"] = [name for name, part in named if isinstance(part, dict) and part.get("required") is True]
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(items, list):  # a tuple, up to draft 2019-09
        prefix, items = items, schema.get("additionalItems", True)
    own["prefixItems"] = [normal(part) for part in prefix]
    own["items"] = normal(items)
    return clean(own)


def has_schema(types: Any) -> bool:
    """Whether a list of types contains a schema (draft 3)."""
    return isinstance(types, list) and any(isinstance(option, dict) for option in types)


def outline(schema: dict[str, Any], *, is_draft3: bool) -> Schema:
    """Return a schema that allows at least what `schema` does, from its types, required names and listed values."""
    if is_draft3:
        return True
    kept: dict[str, Any] = {key: schema[key] for key in ("type", "required") if key in schema}
    kept["properties"] = {
        key: {word: part[word] for word in ("const", "enum") if word in part}
        for key, part in schema.get("properties", {}).items()
        if isinstance(part, dict)
    }
    return clean(kept)
