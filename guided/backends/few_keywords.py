"""Lower a JSON schema for a library that enforces few keywords: the others are left out, and so are checked."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from guided.backends.schema_lowering import ArrayShape, SchemaLowering, counts
from guided.schema.keywords import OF_TYPE


class FewKeywords(SchemaLowering):
    """Lowers one schema. Objects with named properties have no others."""

    enforced: ClassVar[dict[str, tuple[str, ...]]]
    """Type -> its keywords that the library enforces."""
    most_items: ClassVar[float] = math.inf
    """The largest `minItems` that the library counts to."""

    @abstractmethod
    def name(self, text: str) -> str | None:
        """Return the name of a property in the library's characters; None if it is not possible."""

    def of_type(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        own = OF_TYPE.get("number" if kind == "integer" else kind, ())
        for keyword in ("not", *own):
            if keyword in schema and keyword not in self.enforced.get(kind, ()):
                if keyword == "pattern":
                    self.parse_pattern(schema)  # refuses a malformed one
                raise self.refusal(schema, keyword)
        return super().of_type(kind, schema)

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "integer"}

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "number"}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        most = schema.get("maxLength")
        lengths = counts("minLength", int(schema.get("minLength", 0)), "maxLength", None if most is None else int(most))
        return {"type": "string", **lengths} if most != 0 else {"type": "string", "enum": [""]}

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
        if least > self.most_items:
            raise self.refusal(schema, "minItems")
        return lowered | counts("minItems", least, "maxItems", most)

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required, most = schema.get("required", []), schema.get("maxProperties", math.inf)
        rest = schema.get("additionalProperties", True)
        parts = {name: part for name, part in schema.get("properties", {}).items() if part is not False}
        parts |= {name: rest for name in required if name not in parts}
        if "minProperties" in schema and (not parts or schema["minProperties"] > len(required)):
            raise self.refusal(schema, "minProperties")
        if most < (len(parts) or math.inf):
            raise self.refusal(schema, "maxProperties")
        if not parts:
            if schema.get("properties") and rest is not False:
                raise self.refusal(schema, "properties", " that are forbidden in an open object")
            return {"type": "object", **({} if rest in (True, {}) else {"additionalProperties": self.lower(rest)})}
        names = {name: self.name(name) for name in parts}
        if None in [names[name] for name in required]:
            raise self.refusal(schema, "required", " with names that JSON escapes")
        properties = {names[name]: self.lower(part) for name, part in parts.items() if names[name] is not None}
        return {"type": "object", "properties": properties, "required": [names[name] for name in required]}
