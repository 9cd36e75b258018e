"""The common part of the schema adapters: walk a schema in normal form, and refuse what
the library would ignore.

Each adapter derives from `SchemaLowering` and adds how its library reads strings,
numbers, arrays and objects. A refusal names the keyword and its JSON pointer in the
user's document.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from itertools import permutations
from typing import Any, ClassVar

from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.regex import tree as regex
from guided.regex.parser import parse_search
from guided.schema.canonical import canonical
from guided.schema.keywords import ALL_TYPES, NUMBER_BOUNDS, NUMERIC, Schema, listed
from guided.schema.numbers import EXACT, SIGNIFICANT_DIGITS, Numbers, numbers_of

_DEPENDENT = {
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    **dict.fromkeys(NUMBER_BOUNDS, ("multipleOf",)),  # its digits are limited
}
"""Keywords that would exclude more without the first one."""
_COMPLEX = (
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "oneOf",
    "not",
    "if",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords that the canonical form has only where `jsonschema-rs` could not replace
them."""
TIERS = (
    (),
    ("minProperties", "maxProperties", "not"),
    ("patternProperties", "propertyNames"),
    ("allOf", "pattern"),
)
"""Keywords to leave out everywhere, step by step, where a library refuses a schema and
does not say which keyword."""

_MAX_DISTINCT = 5
"""Maximum number of values for which all arrays of distinct ones are listed: there are
326 of five values."""


def any_of(parts: list[JsonObject]) -> JsonObject:
    """Join lowered alternatives."""
    if len(parts) == 1:
        return parts[0]
    return {"anyOf": parts}


def only(schema: JsonObject, *keywords: str) -> JsonObject:
    """Return those of `keywords` that a schema has."""
    return {keyword: schema[keyword] for keyword in keywords if keyword in schema}


class SchemaLowering(ABC):
    """Lowers one schema to the form of one library: the schema itself, or a superset
    without what it does not enforce.

    Args:
        constraint: of the kind `json_schema` or `json_object`.

    Raises:
        UnsupportedConstraint: the library would not enforce a keyword; with its
            pointer.
        InvalidConstraint: no value satisfies the schema, or a pattern is malformed.
    """

    library: ClassVar[str]
    enforces: ClassVar[tuple[str, ...]] = ()
    """Keywords in `_COMPLEX` that the library enforces."""

    def __init__(self, constraint: Constraint) -> None:
        self.form = canonical(
            constraint.schema_text, open_objects=constraint.open_objects
        )
        self.checked: dict[str, None] = {}
        """JSON pointers of the keywords that are left out, in the schema as sent."""
        self._leave_out = constraint.leave_out
        self._strict = constraint.strict
        self.distinct_names = constraint.open_objects is not None
        """No additional key may be nearly a declared name."""
        self._referenced: list[JsonObject] = []

    def document(self) -> JsonObject:
        """Lower the whole schema, with the definitions that `reference` refers to."""
        root = self.lower(self.form.root)
        definitions: JsonObject = {}
        for reference in self._referenced:  # `lower` appends to it
            name = reference["$ref"].removeprefix("#/$defs/")
            if name not in definitions:
                definitions[name] = self.lower(self.form.target(reference))
        if definitions:
            return {**root, "$defs": definitions}
        return root

    def reference(self, schema: JsonObject) -> JsonObject:
        """Lower a `$ref`: keep it, and have `document` add its target."""
        self._referenced.append(schema)
        return schema

    def lower(self, schema: Schema) -> JsonObject:
        """Lower one subschema of the canonical form. Leaves out what the library does
        not enforce."""
        if schema is False:
            raise UnsupportedConstraint(
                f"{self.library} can't enforce a schema that is false",
                param="json_schema",
            )
        if schema is True:
            return self.any_value()
        for keyword in schema.keys() & self._leave_out:
            schema = self._without(schema, self.refusal(schema, keyword))
        while True:
            try:
                return self._lower(schema)
            except UnsupportedConstraint as refusal:
                schema = self._without(schema, refusal)

    def part(self, schema: Schema) -> Schema:
        """Lower the schema of a property or an item, which may be false."""
        if schema is False:
            return False
        return self.lower(schema)

    def _without(
        self, schema: JsonObject, refusal: UnsupportedConstraint
    ) -> JsonObject:
        """Return a superset of `schema` without a keyword, which is checked then."""
        keyword = refusal.keyword
        if self._strict or keyword not in schema:
            refusal.keyword = ""
            raise refusal
        dropped = [
            keyword,
            *(name for name in _DEPENDENT.get(keyword, ()) if name in schema),
        ]
        self.checked |= dict.fromkeys(
            place for name in dropped for place in self.form.pointers(schema, name)
        )
        kept = {name: value for name, value in schema.items() if name not in dropped}
        if keyword == "oneOf":  # at least one of them is still necessary
            kept["anyOf"] = schema["oneOf"]
        elif keyword == "allOf":
            parts = [part for part in schema["allOf"] if isinstance(part, dict)]
            kept |= max(parts, key=lambda part: len(json.dumps(part)))
        return self.form.copied(schema, kept)

    def _lower(self, schema: JsonObject) -> JsonObject:
        if not schema:
            return self.any_value()
        for keyword in _COMPLEX:
            if keyword in schema and keyword not in self.enforces:
                raise self.refusal(schema, keyword)
        if "$ref" in schema:
            return self.reference(schema)
        for keyword in ("const", "enum"):
            if keyword in schema:
                return self.finite(schema, keyword, listed(schema) or [])
        if "anyOf" in schema:
            return any_of(
                [self.lower(part) for part in schema["anyOf"] if part is not False]
            )
        named = schema.get("type", ALL_TYPES)
        if isinstance(named, str):
            return self._of_type(named, schema)
        return any_of([self._of_type(kind, schema) for kind in named])

    def _of_type(self, kind: str, schema: JsonObject) -> JsonObject:
        match kind:
            case "array":
                return self._array(schema)
            case "object":
                return self.object(schema)
            case "string":
                return self.string(schema)
            case "integer" | "number" if schema.keys() & NUMERIC:
                return self.numeric(schema, kind)
        return {"type": kind}

    def any_value(self) -> JsonObject:
        """Return the form of any JSON value."""
        return {}

    @abstractmethod
    def finite(self, schema: JsonObject, keyword: str, values: list[Any]) -> JsonObject:
        """Lower `keyword` (`const` or `enum`) with its `values`."""

    @abstractmethod
    def string(self, schema: JsonObject) -> JsonObject:
        """Lower the type string."""

    def numeric(self, schema: JsonObject, kind: str) -> JsonObject:
        """Lower the type number or integer (`kind`) with bounds or `multipleOf`."""
        return {"type": kind}

    def numbers(self, schema: JsonObject, kind: str) -> Numbers:
        """Return the numbers that may be written; refuse a schema for which there is
        none, or inexact bounds."""
        numbers = numbers_of(schema, kind)
        if "multipleOf" in schema:
            # or there may be no digit after which a number can end
            most = 10**SIGNIFICANT_DIGITS - 1
            fewer = numbers._replace(
                low=max(numbers.low, -most), high=min(numbers.high, most)
            )
            if fewer.units:
                numbers = fewer
        for keyword in NUMERIC:
            if keyword in schema and (
                abs(schema[keyword]) > EXACT or not numbers.units
            ):
                raise self.refusal(
                    schema,
                    keyword,
                    f" {bounded(schema[keyword], 40)}: it has too many digits",
                )
        return numbers

    @abstractmethod
    def array(self, schema: JsonObject) -> JsonObject:
        """Lower the type array, without `contains` and `uniqueItems`."""

    @abstractmethod
    def object(self, schema: JsonObject) -> JsonObject:
        """Lower the type object."""

    def refusal(
        self, schema: Schema, keyword: str, reason: str = ""
    ) -> UnsupportedConstraint:
        """Return the error for a keyword that the library would not enforce."""
        refusal = UnsupportedConstraint(
            f"{self.library} can't enforce {keyword!r}{reason}"
        )
        self.at_keyword(refusal, schema, keyword)
        return refusal

    def at_keyword(
        self, error: InvalidConstraint, schema: Schema, keyword: str
    ) -> InvalidConstraint:
        """Return `error` with the pointer of `keyword`."""
        error.param, error.pointer = (
            "json_schema",
            next(self.form.pointers(schema, keyword)),
        )
        if isinstance(error, UnsupportedConstraint):
            error.keyword = keyword
        return error

    def parse_pattern(self, schema: JsonObject) -> regex.Node:
        """Parse the `pattern` of `schema` into the strings with a match."""
        try:
            return parse_search(schema["pattern"])
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, "pattern") from None

    def _array(self, schema: JsonObject) -> JsonObject:
        """Lower the type array. Few distinct values become one alternative for each
        array of some of them."""
        if "contains" in schema:
            raise self.refusal(schema, "contains")
        if "uniqueItems" not in schema:
            return self.array(schema)
        items = schema.get("items", True)
        if isinstance(items, dict) and "$ref" in items:
            items = self.form.target(items)
        values = listed(items)
        if values is None or len(values) > _MAX_DISTINCT or "prefixItems" in schema:
            raise self.refusal(schema, "uniqueItems")
        options = []
        most = min(len(values), schema.get("maxItems", _MAX_DISTINCT))
        for length in range(schema.get("minItems", 0), most + 1):
            for array in permutations(values, length):
                consts = [{"const": value} for value in array]
                options.append(
                    self.array(
                        {"prefixItems": consts, "minItems": length, "maxItems": length}
                    )
                )
        return any_of(options)


class FewKeywords(SchemaLowering):
    """Lowers for a library that enforces few keywords: every output is checked. Objects
    with `properties` have no others."""

    def __init__(self, constraint: Constraint) -> None:
        if constraint.strict:
            message = f"{self.library} enforces no schema completely: choose llguidance or xgrammar"
            raise UnsupportedConstraint(message, param="json_schema", pointer="")
        super().__init__(constraint)
        self._inlined: list[JsonObject] = []
        """The references that are lowered as their targets at the moment."""

    def reference(self, schema: JsonObject) -> JsonObject:
        """Lower a reference as its target."""
        if schema in self._inlined:
            raise self.refusal(
                schema, "$ref", " that is recursive: it is replaced by its target"
            )
        self._inlined.append(schema)
        try:
            return self.lower(self.form.target(schema))
        finally:
            self._inlined.pop()

    @abstractmethod
    def name(self, text: str) -> str | None:
        """Return the name of a property in the library's characters; None if it is not
        possible."""

    def array(self, schema: JsonObject) -> JsonObject:
        lowered: JsonObject = {"type": "array", **only(schema, "minItems", "maxItems")}
        items = schema.get("items", True)
        if "prefixItems" not in schema and isinstance(items, dict):
            lowered["items"] = self.lower(items)
        return lowered

    def object(self, schema: JsonObject) -> JsonObject:
        required = schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        parts = {
            name: part
            for name, part in schema.get("properties", {}).items()
            if part is not False
        }
        parts |= {
            name: rest for name in required if name not in parts and rest is not False
        }
        names = {
            name: written for name in parts if (written := self.name(name)) is not None
        }
        lowered: JsonObject = {"type": "object"}
        if names:
            lowered["properties"] = {
                written: self.lower(parts[name]) for name, written in names.items()
            }
            lowered["required"] = [names[name] for name in required if name in names]
        elif isinstance(rest, dict) and rest:
            lowered["additionalProperties"] = self.lower(rest)
        return lowered
