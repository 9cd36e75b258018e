"""The canonical form of a JSON schema: the same meaning with fewer combinations of
keywords.

`jsonschema-rs` computes it: it merges `allOf` and siblings of `$ref`, and replaces
`oneOf`, `not`, `if`, dependencies and `unevaluated*` by alternatives where it can. Its
result is read here in the terms of draft 2020-12, with the order of properties and the
JSON pointers of the schema as sent:

- there are no annotations and no unknown formats;
- `$ref` is "#/$defs/<name>" and has no siblings, nor have `anyOf`, `oneOf`, `allOf`,
  `enum` and `const`;
- tuples are `prefixItems`, and exclusive bounds are numbers;
- named properties are in `properties`, in their order, unless other properties have the
  same schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

from jsonschema_rs import CanonicalSchema
from jsonschema_rs.canonical import (
    Satisfiability,
    UnsatisfiableReason,
    find_unsatisfiable,
)
from jsonschema_rs.canonical.json import to_string

from guided.errors import ConstraintTooLarge, InvalidConstraint
from guided.json_text import JsonObject
from guided.schema import string_pattern
from guided.schema.alternatives import (
    CLOSING,
    FRACTIONS,
    Alternatives,
    canonicalize,
    without_frame,
)
from guided.schema.formats import FORMATS
from guided.schema.graph import Node, SchemaGraph
from guided.schema.keywords import (
    COMPOUND,
    KEYWORDS,
    Schema,
    as_object,
    listed,
    shortened,
)
from guided.schema.origin import Origin
from guided.schema.validation import PATTERNS, draft_of

_ROOT = "guided-root"
"""Name of the definition for the whole schema."""
_MAX_CHARACTERS = 300_000
_MAX_GROWTH = 20
"""Maximum size of the form as JSON text: `_MAX_CHARACTERS` and `_MAX_GROWTH` times the
schema's size."""
_OWN_NAME = "urn:jsonschema:canonical:"
"""How the library's names of definitions begin that are no pointers into the schema as
sent: a URI, escaped."""
_NO_BASE = "json-schema:///"
"""How such a URI begins in a document without an identifier."""


def canonical(
    schema: Schema | str, *, open_objects: bool | None = None
) -> CanonicalForm:
    """Return the canonical form of a schema that `guided.schema.document.parse`
    returned, or of its JSON text.

    See `CanonicalForm`.
    """
    if not isinstance(schema, str):
        schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return _form(schema, open_objects)


@lru_cache(maxsize=4)  # each backend that is tried asks for it
def _form(text: str, open_objects: bool | None) -> CanonicalForm:
    return CanonicalForm(as_object(json.loads(text)), open_objects=open_objects)


class CanonicalForm:
    """A schema in canonical form: `root` refers to `definitions` as "#/$defs/<name>".

    Args:
        document: is changed.
        open_objects: whether an object that names its properties may have others where
            the schema does not say. If not, each such object is closed, as a whole:
            with the properties of `allOf`, `$ref` and the condition that holds.

    Raises:
        InvalidConstraint: no value satisfies the schema, or the library does not take
            it.
    """

    def __init__(
        self, document: JsonObject, *, open_objects: bool | None = None
    ) -> None:
        self._open_objects = open_objects
        self._draft = draft_of(document)
        self._graph = SchemaGraph(document)
        self._library = self._form(document)
        self._alternatives = Alternatives(self._library, self._draft)
        self._left_out: list[Any] = [False]
        """What is no alternative of others."""
        if not any(map(self._excludes_numbers, self._graph.nodes())):
            self._left_out.append(FRACTIONS)
        self._origins: dict[int, tuple[Schema, Origin]] = {}
        """`id` of a subschema -> the subschema, so that its `id` is not used again, and
        its origin."""
        self._names: dict[str, str] = {}
        """Reference of the library -> name of the definition."""
        self.definitions: dict[str, Schema] = {}
        self.root = self._read(
            self._library, Origin.of(self._graph, [self._graph.root])
        )

    def _form(self, document: JsonObject) -> Any:
        """Return the library's form of the document."""
        empty: list[Any] = []

        def replaced(part: JsonObject) -> JsonObject:
            if not string_pattern.is_empty(part):
                return part
            empty.append(part)
            return {"not": {}}

        # with Python's usual numbers once it is read
        text = to_string(self._checked(document).to_json_schema())
        if len(text) > _MAX_CHARACTERS + _MAX_GROWTH * len(json.dumps(document)):
            raise ConstraintTooLarge(
                "the alternatives of the schema multiply: it has too many",
                param="json_schema",
            )
        schema = json.loads(text, object_hook=replaced)
        if empty:
            return self._form(schema)
        named = text.replace('{"$ref":"#"}', f'{{"$ref":"#/$defs/{_ROOT}"}}')
        if (
            named != text
            # parts of it stand alone too, so what refers to the whole of it needs a
            # definition
        ):
            schema = json.loads(named)
            schema["$defs"] = {**schema.get("$defs", {}), _ROOT: without_frame(schema)}
        return schema

    def _checked(self, document: JsonObject) -> CanonicalSchema:
        """Return the library's form of the document, which has values."""
        root = self._graph.root.schema
        try:
            form = canonicalize(document, self._draft)
        except InvalidConstraint as error:
            error.pointer = shortened(self._bad_pattern())
            raise
        if form.satisfiability() == Satisfiability.NO:
            reasons = find_unsatisfiable(
                root, validate_formats=True, pattern_options=PATTERNS, offline=True
            )
            # A subschema that is `false` is meant to be.
            conflicts = (
                at
                for at, reason in reasons.items()
                if not isinstance(reason, UnsatisfiableReason.Literal)
            )
            place = ""
            if "" in reasons:
                place = max(conflicts, key=len, default="")
            raise InvalidConstraint(
                "no value satisfies the schema",
                param="json_schema",
                pointer=shortened(place),
            )
        return form

    def _excludes_numbers(self, node: Node) -> bool:
        """Return whether a subschema may exclude integers and leave other numbers."""
        if "not" in node.schema or "if" in node.schema:
            return True
        parts = [child for keyword, child in node.same if keyword == "oneOf"]
        types = [
            str(part.schema.get("type")) for part in Origin.of(self._graph, parts).nodes
        ]
        return any("integer" in text or "number" in text for text in types)

    def _bad_pattern(self) -> str:
        """Return the pointer of a pattern that the library does not take; that of the
        root if there is none."""
        for node in self._graph.nodes():
            for place, pattern in node.patterns():
                try:
                    canonicalize({"pattern": pattern}, self._draft)
                except InvalidConstraint:
                    return place
        return ""

    def pointers(self, schema: Schema, keyword: str) -> Iterator[str]:
        """Iterate over the JSON pointers in the schema as sent from which `keyword` may
        come: at least one."""
        if id(schema) not in self._origins:
            return iter([""])
        return self._origins[id(schema)][1].pointers(keyword)

    def target(self, schema: JsonObject) -> Schema:
        """Return the target of a `$ref`."""
        return self.definitions[schema["$ref"].removeprefix("#/$defs/")]

    def copied(self, schema: JsonObject, changed: JsonObject) -> JsonObject:
        """Return `changed`, which comes from where `schema` does."""
        if id(schema) in self._origins:
            self._origins[id(changed)] = (changed, self._origins[id(schema)][1])
        return changed

    def _read(self, schema: Any, origin: Origin, *, is_part: bool = False) -> Schema:
        """Return a subschema of the library's form.

        Args:
            is_part: another subschema describes the same value, so an object is not
                closed here, and `oneOf` is no fewer values: one that an alternative
                leaves out may be all that the other subschema has.
        """
        if isinstance(schema, bool) or schema.keys().isdisjoint(KEYWORDS):
            return schema is not False
        if "allOf" in schema or "oneOf" in schema:
            return self._merged(schema, origin, is_part)
        return self._read_keywords(schema, origin, is_part)

    def _read_keywords(
        self, schema: JsonObject, origin: Origin, is_part: bool
    ) -> Schema:
        read: JsonObject = {}
        keywords = schema.keys() & KEYWORDS
        inner = is_part or len(keywords) > 1 or "allOf" in keywords
        for keyword, value in schema.items():
            if keyword in keywords:
                read |= self._keyword(schema, keyword, value, origin, inner)
        match read:
            case {"anyOf": []}:
                return False
            case {"anyOf": [alternative]} if len(read) == 1:
                return cast("Schema", alternative)
        if read.get("format", "date") not in FORMATS:
            del read["format"]  # an annotation
        result = _apart(_in_order(_closed(read), origin))
        if self._open_objects is False and not is_part:
            for part in result.get("allOf", [result]):
                _close(part, origin)
        for part in (result, *result.get("allOf", ())):
            self._origins.setdefault(id(part), (part, origin))
        return result

    def _keyword(
        self,
        schema: JsonObject,
        keyword: str,
        value: Any,
        origin: Origin,
        is_part: bool,
    ) -> JsonObject:
        """Return one keyword of a subschema in draft 2020-12; nothing if another one
        says the same."""
        match keyword:
            case "$ref" if not value.startswith("#/"):
                # the library does not read the subschema, and has it as it was sent
                return {"$dynamicRef": value}
            case "$ref":
                return {keyword: f"#/$defs/{self._definition(value, origin, is_part)}"}
            case "anyOf" | "oneOf":
                parts = [
                    self._read(part, origin.alternative(part), is_part=is_part)
                    for part in value
                ]
                return {keyword: [part for part in parts if part not in self._left_out]}
            case "allOf":
                return {
                    keyword: [
                        self._read(part, origin, is_part=is_part) for part in value
                    ]
                }
            case "not" | "if" | "then" | "else":
                return {keyword: self._read(value, origin)}
            case "properties":
                return {
                    keyword: {
                        name: self._read(part, origin.property(name))
                        for name, part in value.items()
                    }
                }
            case "patternProperties" | "dependentSchemas":
                named = {
                    name: self._read(part, origin.part(keyword, name=name))
                    for name, part in value.items()
                }
                return {keyword: named}
            case (
                "contains"
                | "propertyNames"
                | "additionalProperties"
                | "unevaluatedProperties"
            ):
                return {keyword: self._read(value, origin.part(keyword))}
            case "items" | "prefixItems" if isinstance(value, list):
                places = (
                    origin.part("prefixItems", "items", name=index)
                    for index in range(len(value))
                )
                return {
                    "prefixItems": [
                        self._read(part, place)
                        for part, place in zip(value, places, strict=True)
                    ]
                }
            case "items" | "additionalItems":
                return {
                    "items": self._read(
                        value,
                        origin.part("items", "additionalItems", "unevaluatedItems"),
                    )
                }
            case "enum":
                return {keyword: origin.values(value)}
            case "const":
                return {keyword: origin.values([value])[0]}
        return {keyword: value}

    def _merged(self, schema: JsonObject, origin: Origin, is_part: bool) -> Schema:
        """Return `oneOf`, or a recursive reference, and what stands next to it as a
        definition without `allOf`.

        The library could not merge these.
        """
        key = json.dumps([schema, is_part])
        name = self._names.get(key)
        if name is None and len(self._names) < 1_000:
            with suppress(InvalidConstraint):
                parts = self._alternatives.of(schema)
                is_narrowed = is_part and parts != self._alternatives.of(
                    schema, exclusive=False
                )
                if not is_narrowed and not any("allOf" in part for part in parts):
                    name = self._names[key] = f"d{len(self._names)}"
                    body: Schema = {"anyOf": parts}
                    if len(parts) == 1:
                        body = parts[0]
                    self.definitions[name] = self._read(body, origin, is_part=is_part)
        if name is None:
            return self._read_keywords(schema, origin, is_part)
        return self.definitions.get(name) is not False and {"$ref": f"#/$defs/{name}"}

    def _definition(self, reference: str, origin: Origin, is_part: bool) -> str:
        """Return the name of the definition for a reference of the library at
        `origin`."""
        key = f"{reference} {is_part}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            source = self._source(reference)
            if source is not None:
                origin = Origin.of(self._graph, [source])
            target = self._alternatives.unfolded({"$ref": reference})
            self.definitions[name] = self._read(target, origin, is_part=is_part)
        return name

    def _source(self, reference: str) -> Node | None:
        """Return the subschema as sent that a reference of the library leads to; None
        if it is not known."""
        reference = unquote(reference)
        if reference == f"#/$defs/{_ROOT}":
            return self._graph.root
        name = unquote(reference.rpartition("/")[2])
        if name.startswith(_OWN_NAME):
            reference = (
                name.removeprefix(_OWN_NAME)
                .removeprefix(_NO_BASE)
                .partition("|dyn=")[0]
            )
        return self._graph.target(reference)


def _closed(schema: JsonObject) -> JsonObject:
    """Write `propertyNames` that admits only the named properties and patterns as
    `additionalProperties: false`."""
    names = schema.get("propertyNames", True)
    if isinstance(names, bool):
        return schema
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    rest = schema.get("additionalProperties", True)
    listed_names: list[str] = []
    listed_patterns: list[str] = []
    for part in names.get("anyOf", [names]):
        values = listed(part)
        if values is not None:
            listed_names += values
        elif isinstance(part, dict) and part.keys() == {"type", "pattern"} and patterns:
            listed_patterns.append(part["pattern"])
        else:
            return schema
    if rest is True:  # the library leaves out a pattern of properties with any value
        patterns = dict.fromkeys(listed_patterns, True) | patterns
    if set(listed_patterns) != patterns.keys():
        return schema
    closed = {**schema, "additionalProperties": False}
    del closed["propertyNames"]
    named = {name: properties.get(name, rest) for name in listed_names}
    if patterns:
        if any(
            string_pattern.matches(pattern, name)
            for name in named
            for pattern in patterns
        ):
            return schema
        closed["patternProperties"] = patterns
        named |= properties
    if named:
        closed["properties"] = named
    return closed


def _in_order(schema: JsonObject, origin: Origin) -> JsonObject:
    """Put the properties in their order in the schema as sent.

    Adds those that the library left out, because any other property has the same
    schema.
    """
    if schema.get("type") != "object":
        return schema
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    rest = schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties")
    kept = {*properties}
    if not patterns:
        kept.update(required)
    if rest is not False and not patterns and "propertyNames" not in schema:
        kept |= origin.declared()
    names = dict.fromkeys((*origin.names(properties), *required, *properties))
    ordered = dict(schema)
    if kept:
        ordered["properties"] = {
            name: properties.get(name, rest) for name in names if name in kept
        }
    if required:
        ordered["required"] = [name for name in names if name in required]
    return ordered


def _close(schema: JsonObject, origin: Origin) -> None:
    """Forbid other properties in an object that names some, unless the schema as sent
    says whether it has others."""
    names = origin.closed_names()
    if (
        names is None
        or schema.get("type") != "object"
        or not schema.keys().isdisjoint(CLOSING)
    ):
        return
    properties = schema.get("properties", {})
    restricted = [name for name, part in properties.items() if part is not True]
    named = {name: properties.get(name, True) for name in (*names, *restricted)}
    if schema.get("minProperties", 0) <= len(named):
        schema |= {"properties": named, "additionalProperties": False}


def _apart(schema: JsonObject) -> JsonObject:
    """Write alternatives, references and listed values without siblings: under
    `allOf`."""
    combined = [keyword for keyword in schema if keyword in COMPOUND]
    if not combined or len(schema) == 1:
        return schema
    rest = {
        keyword: value for keyword, value in schema.items() if keyword not in COMPOUND
    }
    parts: list[Any] = [
        {keyword: schema[keyword]} for keyword in combined if keyword != "allOf"
    ]
    for part in reversed(schema.get("allOf", ())):
        if isinstance(part, dict) and not part.keys() & COMPOUND:
            if "type" not in part and "type" in rest:
                part = {"type": rest["type"], **part}
            if part.get("type") == rest.get("type") and (
                part.keys() - {"type"}
            ).isdisjoint(rest):
                rest |= part
                continue
        parts.insert(0, part)
    if not parts:
        return rest
    if rest:
        parts.insert(0, rest)
    return {"allOf": parts}
