"""Lower a JSON schema for a library that enforces few keywords: the others are left out, and so are checked."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering
from guided.schema import string_pattern
from guided.schema.keywords import OF_TYPE


class FewKeywords(SchemaLowering):
    """Lowers one schema. Objects with named properties have no others, and strings with a pattern no escapes."""

    enforced: ClassVar[dict[str, tuple[str, ...]]]
    """Type -> its keywords that the library enforces."""
    formats: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def text(self, least: int, most: float) -> dict[str, Any]:
        """Return the form of strings of `least` to `most` characters."""

    @abstractmethod
    def matching(self, pattern: regex.Node) -> dict[str, Any]:
        """Return the form of strings that are without escapes in JSON and match `pattern` as a whole."""

    @abstractmethod
    def name(self, text: str) -> str | None:
        """Return the name of a property in the library's characters; None if it is not possible."""

    def of_type(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        own = OF_TYPE.get("number" if kind == "integer" else kind, ())
        for keyword in ("not", *own):
            if keyword in schema and keyword not in self.enforced.get(kind, ()):
                raise self.refusal(schema, keyword)
        return super().of_type(kind, schema)

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "integer"}

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "number"}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        conditions = [name for name in ("format", "pattern", "minLength", "maxLength") if name in schema]
        if not conditions or conditions[0].endswith("Length"):
            return self.text(int(schema.get("minLength", 0)), schema.get("maxLength", math.inf))
        if len(conditions) > 1:
            raise self.refusal(schema, conditions[1], f" next to {conditions[0]!r}")
        if "format" in schema:
            if schema["format"] not in self.formats:
                raise self.refusal(schema, "format", f" {schema['format']}")
            return {"type": "string", "format": schema["format"]}
        plain = regex.within(self.parse_pattern(schema, "pattern", schema["pattern"]), string_pattern.PLAIN)
        if plain is None:
            raise self.refusal(schema, "pattern", " that only text with escaped characters matches")
        return self.matching(plain)

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        prefix, items, least, most = shape
        if prefix:
            fits = least <= len(prefix) and (most is None or len(prefix) <= most)
            if "prefixItems" not in self.enforced["array"] or not fits:
                raise self.refusal(schema, "prefixItems", " for single places, except in arrays of just these items")
            return {"prefixItems": [self.lower(part) for part in prefix]}
        lowered: dict[str, Any] = {"type": "array"}
        if items not in (True, {}):
            lowered["items"] = self.lower(items)
        return lowered | ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required, most = schema.get("required", []), schema.get("maxProperties", math.inf)
        parts = {name: part for name, part in schema.get("properties", {}).items() if part is not False}
        if "minProperties" in schema and (not parts or schema["minProperties"] > len(required)):
            raise self.refusal(schema, "minProperties")
        if most < (len(parts) or math.inf):
            raise self.refusal(schema, "maxProperties")
        rest = schema.get("additionalProperties", True)
        if not parts:
            if schema.get("properties") and rest is not False:
                raise self.refusal(schema, "properties", " that are forbidden in an open object")
            return {"type": "object", **({} if rest in (True, {}) else {"additionalProperties": self.lower(rest)})}
        names = {name: self.name(name) for name in parts}
        if None in [names[name] for name in required]:
            raise self.refusal(schema, "required", " with names that JSON escapes")
        properties = {names[name]: self.lower(part) for name, part in parts.items() if names[name] is not None}
        return {"type": "object", "properties": properties, "required": [names[name] for name in required]}
