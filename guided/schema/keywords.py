"""Keywords of JSON Schema, what single ones mean in canonical form, and JSON pointers (RFC 6901) to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, TypeGuard

from guided.errors import MAX_ECHO, bounded

Schema = dict[str, Any] | bool

ALL_TYPES = ("null", "boolean", "object", "array", "number", "string")
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMERIC = (*NUMBER_BOUNDS, "multipleOf")
COMPOUND = {"$ref", "anyOf", "oneOf", "allOf", "if", "enum", "const"}
"""Keywords that have no siblings in canonical form."""

MISSPELT = (
    *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems"),
    *("maxItems", "uniqueItems", "unevaluatedItems", "contains", "minContains", "maxContains", "properties"),
    *("patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties", "required"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
"""Keywords of which a misspelling is noted."""
OTHERS = ("not", "if", "then", "else", "additionalItems", "dependencies", "$dynamicRef", "$recursiveRef")
"""Other keywords that restrict values."""


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types of a subschema in canonical form; all if it names none. "number" includes "integer"."""
    if isinstance(schema, dict):
        named = schema.get("type", ALL_TYPES)
    else:
        named = ALL_TYPES
    return frozenset([named] if isinstance(named, str) else named)


def listed(schema: Schema) -> list[Any] | None:
    """Return the values of a subschema with `enum` or `const`."""
    if isinstance(schema, bool) or not ("enum" in schema or "const" in schema):
        return None
    values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
    return values


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number: Python's booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a JSON value."""
    if is_number(value):
        yield value
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers_in(member)


def escape(token: str) -> str:
    """Escape one token of a JSON pointer."""
    if "~" in token or "/" in token:
        return token.replace("~", "~0").replace("/", "~1")
    return token


def unescape(token: str) -> str:
    """Undo `escape`."""
    return token.replace("~1", "/").replace("~0", "~")


def pointer(path: Iterable[str | int]) -> str:
    """Return the pointer of a path of keys and indices; empty for the document itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def at(document: Any, place: str) -> Any:
    """Return the value at a JSON pointer. Raises LookupError, ValueError or TypeError if there is none."""
    for token in place.split("/")[1:]:
        name = unescape(token)
        document = document[int(name) if isinstance(document, list) else name]
    return document


def replaced(document: Any, place: str, value: Any) -> Any:
    """Return a copy of a document with another value at a JSON pointer. Only what contains the place is copied."""
    if not place:
        return value
    token, _, rest = place[1:].partition("/")
    copied = copy(document)
    name = int(token) if isinstance(copied, list) else unescape(token)
    copied[name] = replaced(copied[name], rest and f"/{rest}", value)
    return copied


def shortened(whole: str) -> str:
    """Return a pointer as valid Unicode, or that of its nearest ancestor of at most `MAX_ECHO` characters."""
    printable = bounded(whole, len(whole) * 10)
    if len(printable) <= MAX_ECHO:
        return printable
    return printable[: printable.rfind("/", 0, MAX_ECHO + 1)]
