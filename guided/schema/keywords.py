"""Keywords of JSON Schema, what single ones mean in canonical form, and JSON pointers
(RFC 6901) to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, TypeGuard

from guided.errors import MAX_ECHO, bounded
from guided.json_text import JsonObject

Schema = JsonObject | bool

ALL_TYPES = ("null", "boolean", "object", "array", "number", "string")
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMERIC = (*NUMBER_BOUNDS, "multipleOf")
COMPOUND = {"$ref", "anyOf", "oneOf", "allOf", "if", "enum", "const"}
"""Keywords that have no siblings in canonical form."""

KEYWORDS = {
    "type",
    "enum",
    "const",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "required",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "$dynamicRef",
    "$recursiveRef",
}
"""Keywords that restrict values."""
OPENING = {"additionalProperties", "unevaluatedProperties"}
"""Keywords that say whether an object has other properties than those that are
named."""


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types of a subschema in canonical form; all if it names none. "number"
    includes "integer"."""
    if isinstance(schema, bool):
        return frozenset(ALL_TYPES)
    named = schema.get("type", ALL_TYPES)
    if isinstance(named, str):
        return frozenset([named])
    return frozenset(named)


def listed(schema: Schema) -> list[Any] | None:
    """Return the values of a subschema with `enum` or `const`; None for others."""
    if isinstance(schema, bool):
        return None
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def as_object(schema: Schema) -> JsonObject:
    """Return a copy of a schema as an object with the same meaning."""
    if schema is False:
        return {"not": {}}
    if schema is True:
        return {}
    return dict(schema)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number. Python's booleans are integers, too, but
    JSON's are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a JSON value."""
    if is_number(value):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from numbers_in(member)
    elif isinstance(value, list):
        for member in value:
            yield from numbers_in(member)


def escape(token: str) -> str:
    """Escape one token of a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """Undo `escape`."""
    return token.replace("~1", "/").replace("~0", "~")


def pointer(path: Iterable[str | int]) -> str:
    """Return the pointer of a path of keys and indices; empty for the document
    itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def _key(container: Any, token: str) -> Any:
    """Return the key or index that one token of a JSON pointer means in an object or
    array."""
    if isinstance(container, list):
        return int(token)
    return unescape(token)


def at(document: Any, place: str) -> Any:
    """Return the value at a JSON pointer. Raises LookupError, ValueError or TypeError
    if there is none."""
    for token in place.split("/")[1:]:
        document = document[_key(document, token)]
    return document


def replaced(document: Any, place: str, value: Any) -> Any:
    """Return a copy of a document with another value at a JSON pointer. Only what
    contains the place is copied."""
    if not place:
        return value
    token, _, rest = place[1:].partition("/")
    copied = copy(document)
    name = _key(document, token)
    copied[name] = replaced(copied[name], rest and f"/{rest}", value)
    return copied


def shortened(whole: str) -> str:
    """Return a pointer as valid Unicode, or that of its nearest ancestor of at most
    `MAX_ECHO` characters."""
    printable = bounded(whole, len(whole) * 10)
    if len(printable) <= MAX_ECHO:
        return printable
    return printable[: printable.rfind("/", 0, MAX_ECHO + 1)]
