"""JSON Schema for lm-format-enforcer: the schema rewritten in the few forms that it reads correctly.

Its schema parser reads one keyword of a subschema and ignores the others, so it gets the normal form with references
expanded. Where properties are named, its objects hold those and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering, any_of, counts
from guided.errors import InvalidConstraint, bounded
from guided.schema import string_pattern
from guided.schema.keywords import ALL_TYPES, OF_TYPE, Schema, is_number


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema in the library's terms."""

    schema: dict[str, Any]
    patterns: set[str]
    """Patterns of strings, as full matches in the common subset of regexes."""
    literals: set[str]
    """Texts that strings and keys may be required to equal."""


def lower(schema: Schema) -> Lowered:
    """Lower `schema` for lm-format-enforcer. Raises as `SchemaLowering` does."""
    lowering = _Lowering(schema)
    lowered = lowering.lower(lowering.form.root)
    if lowering.definitions:
        lowered = {**lowered, "$defs": lowering.definitions}
    return Lowered(lowered, lowering.patterns, lowering.literals)


class _Lowering(SchemaLowering):
    library = "lm-format-enforcer"
    max_subschemas = 5_000

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._recursive: set[str] = set()
        self.definitions: dict[str, Any] = {}
        self.patterns: set[str] = set()
        self.literals: set[str] = set()

    def any_value(self) -> dict[str, Any]:
        return any_of([{"type": kind} for kind in ALL_TYPES])

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Keep only recursive `$ref`s: the library reads the definition again at each one, and equal states differ."""
        name = schema["$ref"].removeprefix("#/$defs/")
        expanded = self.expand(schema)
        if expanded is None:
            self._recursive.add(name)
            return schema
        if name in self._recursive:
            self.definitions[name] = expanded
        return expanded

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        options: list[dict[str, Any]] = []
        if texts := [value for value in values if isinstance(value, str)]:
            options.append({"type": "string", "enum": self._unescaped(texts, schema, keyword)})
        if numbers := [value for value in values if is_number(value)]:
            options.append({"enum": numbers})
        if None in values:
            options.append({"type": "null"})
        booleans = [value for value in values if isinstance(value, bool)]
        if len(booleans) == 2:
            options.append({"type": "boolean"})
        elif booleans or any(isinstance(value, list | dict) for value in values):
            raise self.refusal(schema, keyword, " with arrays, objects or just one of the booleans")
        return any_of(options)

    def _unescaped(self, texts: Iterable[str], schema: Schema, keyword: str) -> list[str]:
        texts = list(texts)
        for text in texts:
            if json.dumps(text, ensure_ascii=False)[1:-1] != text:
                raise self.refusal(schema, keyword, f" with text that JSON escapes ({bounded(text, 40)!r})")
        self.literals.update(texts)
        return texts

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        lengths: dict[str, Any] = {
            keyword: int(schema[keyword]) for keyword in ("minLength", "maxLength") if keyword in schema
        }
        if "format" in schema:
            raise self.refusal(schema, "format")
        if not schema.get("pattern"):  # the empty pattern is found in any string
            return {"type": "string", "enum": [""]} if lengths.get("maxLength") == 0 else {"type": "string", **lengths}
        for keyword in lengths:
            raise self.refusal(schema, keyword, " next to 'pattern'")
        try:  # narrowed: a full match, not a search
            node = regex.parse_ecma(schema["pattern"], param="json_schema")
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, "pattern") from None
        plain = regex.within(node, string_pattern.PLAIN)
        if plain is None:
            raise self.refusal(schema, "pattern", " that only text with escaped characters matches")
        if plain == regex.EMPTY:
            return {"type": "string", "enum": [""]}
        pattern = f"(?:{regex.render(regex.with_small_classes(plain))})"
        self.patterns.add(pattern)
        return {"type": "string", "pattern": pattern}

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        for keyword in OF_TYPE["number"]:
            if keyword in schema:
                raise self.refusal(schema, keyword)
        return {"type": "integer"}

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {**self.integer(schema), "type": "number"}

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        if "prefixItems" in schema:
            raise self.refusal(schema, "prefixItems")
        if shape.items is False:
            raise self.refusal(schema, "maxItems" if "maxItems" in schema else "items", " that leaves no item")
        lowered: dict[str, Any] = {"type": "array"}
        if shape.items is not True and shape.items != {}:
            lowered["items"] = self.lower(shape.items)
        return lowered | counts("minItems", shape.least, "maxItems", shape.most)

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required, rest = schema.get("required", []), schema.get("additionalProperties", True)
        if not self._adds_required_only(schema, rest):
            properties = self.only_named(schema)
            if properties is not None:
                self._unescaped(properties, schema, "properties")
                lowered = {name: self.lower(value) for name, value in properties.items()}
                return {"type": "object", "properties": lowered, "required": required}
            if "minProperties" in schema:
                raise self.refusal(schema, "minProperties")
        any_name: dict[str, Any] = {"type": "object", "required": self._unescaped(required, schema, "required")}
        return any_name if rest is True or rest == {} else {**any_name, "additionalProperties": self.lower(rest)}

    def _adds_required_only(self, schema: dict[str, Any], rest: Schema) -> bool:
        """Whether `properties` has only the required names that the normal form adds: others are allowed too."""
        if rest is False or not schema.keys() <= {"type", "properties", "required", "additionalProperties"}:
            return False
        properties, required = schema.get("properties", {}), schema.get("required", [])
        return all(name in required and value == rest for name, value in properties.items())
