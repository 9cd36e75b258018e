"""Schemas as clients send them: what is harmless and no valid JSON Schema, or another
dialect's, is rewritten.

`tidy` makes a document valid before it is checked, and keeps the places of its
subschemas. `upgrade` writes a checked subschema of drafts 4 to 7 in draft 2019-09,
`rewrite` one of any draft with keywords that every library reads.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from guided.json_text import JsonObject
from guided.schema.ecma import translate
from guided.schema.graph import children
from guided.schema.validation import Validator, draft_of

_VALUES = ("const", "default", "type")
"""Keywords that may be null, or where null is an error."""
_ANNOTATIONS: dict[str, type] = {
    **dict.fromkeys(
        (
            "title",
            "description",
            "$comment",
            "contentEncoding",
            "contentMediaType",
            "format",
        ),
        str,
    ),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly"), bool),
    **dict.fromkeys(("contentSchema", "$vocabulary"), dict),
    "examples": list,
}
_URI = Validator({"type": "string", "format": "uri-reference", "pattern": "^[^#]*#?$"})
_ANCHOR = Validator({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"})
_IDENTIFIERS = {"$id": _URI, "id": _URI, "$anchor": _ANCHOR, "$dynamicAnchor": _ANCHOR}
_WITH_ANCHOR = Validator(
    {"type": "string", "format": "uri-reference", "pattern": "^(?!#/)"}
)
"""Identifiers in drafts 4 to 7: their fragment is an anchor."""
_NULL = {"type": "null"}
_BESIDE_REFERENCES = {"$schema", "$ref", "definitions", "$defs"}
"""Keywords that drafts 4 to 7 do not ignore beside `$ref`, or that a reference may lead
to."""


def tidy(document: JsonObject) -> list[JsonObject]:
    """Make a document valid where its fault says nothing about values, and return its
    subschemas by position.

    Keywords that are null and annotations of a wrong type or with NUL characters are
    removed, and identifiers that are no URIs, unless a reference has the same text.
    """
    schemas: list[JsonObject] = []
    todo: list[Any] = [document]
    for schema in todo:  # which grows
        if isinstance(schema, dict):
            schemas.append(schema)
            todo += [child for _, child, _ in children(schema)]
    references = {str(schema.get("$ref")) for schema in schemas}
    references |= {reference.partition("#")[0] for reference in references}
    identifiers = dict(_IDENTIFIERS)
    if "draft-0" in draft_of(document):
        identifiers |= dict.fromkeys(("$id", "id"), _WITH_ANCHOR)
    for schema in schemas:
        for keyword, value in list(schema.items()):
            kind = _ANNOTATIONS.get(keyword, object)
            is_wrong = not isinstance(value, kind) or (
                kind is str and "\0" in str(value)
            )
            if value is None and keyword not in _VALUES:
                is_wrong = True
            if keyword in identifiers and identifiers[keyword].violation(value):
                is_wrong = not value or references.isdisjoint((str(value), f"#{value}"))
            if is_wrong:
                del schema[keyword]
    return schemas


def rewrite(schema: JsonObject) -> None:
    """Write one subschema with other keywords: patterns, `propertyOrdering` of Gemini,
    `nullable` of OpenAPI 3.0."""
    for keyword, written in (("$ref", _uri), ("$id", _uri), ("pattern", translate)):
        if isinstance(schema.get(keyword), str):
            schema[keyword] = written(schema[keyword])
    match schema:
        case {"patternProperties": dict(parts)}:
            schema["patternProperties"] = {
                translate(pattern): part for pattern, part in parts.items()
            }
    match schema:
        case {"properties": dict(parts), "propertyOrdering": list(order)}:
            names = [
                name
                for name in (*order, *parts)
                if isinstance(name, str) and name in parts
            ]
            schema["properties"] = {name: parts[name] for name in names}
    if schema.pop("nullable", None) is True:
        _allow_null(schema)


def upgrade(schema: JsonObject, draft: str) -> None:
    """Write a subschema of draft 4, 6 or 7 in draft 2019-09, which knows all formats
    and does not check contents.

    Younger keywords than the draft are kept: they are meant.

    Args:
        draft: identifier of the schema's draft, as `draft_of` returns it.
    """
    if "$ref" in schema:
        for keyword in schema.keys() - _BESIDE_REFERENCES:
            del schema[keyword]
    if "draft-04" in draft:
        if "id" in schema:
            schema["$id"] = schema.pop("id")
        for exclusive, bound in (
            ("exclusiveMinimum", "minimum"),
            ("exclusiveMaximum", "maximum"),
        ):
            if schema.pop(exclusive, False) and bound in schema:
                schema[exclusive] = schema.pop(bound)
    base, _, anchor = schema.pop("$id", "").partition("#")
    if base:
        schema["$id"] = base
    if anchor and not _ANCHOR.violation(anchor):
        schema["$anchor"] = anchor


def _allow_null(schema: JsonObject) -> None:
    """Change each keyword that excludes null."""
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"]]
    for keyword, null in (("type", "null"), ("enum", None), ("anyOf", _NULL)):
        if null not in schema.get(keyword, [null]):
            schema[keyword] = [*schema[keyword], null]
    others = {
        keyword: schema.pop(keyword)
        for keyword in ("$ref", "const", "oneOf", "allOf")
        if keyword in schema
    }
    if others:
        schema["allOf"] = [{"anyOf": [others, _NULL]}]


def _uri(text: str) -> str:
    """Return a reference as a URI: only the first "#" in it is a mark, and a lone "%"
    is a character."""
    base, mark, fragment = re.sub("%(?![0-9A-Fa-f]{2})", "%25", text).partition("#")
    return quote(base, _SAFE) + mark + quote(fragment, _SAFE)


_SAFE = "!$&'()*+,;=:@/?~%"
