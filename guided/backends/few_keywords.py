"""Lower a JSON schema for a library that enforces few keywords: the others are ignored, and every output is checked."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from guided.backends.schema_lowering import ArrayShape, SchemaLowering, counts


class FewKeywords(SchemaLowering):
    """Lowers one schema. Objects with named properties have no others."""

    @abstractmethod
    def name(self, text: str) -> str | None:
        """Return the name of a property in the library's characters; None if it is not possible."""

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "integer"}

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "number"}

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        lowered = {"type": "array", **counts("minItems", shape.least, "maxItems", shape.most)}
        if not shape.prefix and isinstance(shape.items, dict) and shape.items:
            lowered["items"] = self.lower(shape.items)
        return lowered

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required, rest = schema.get("required", []), schema.get("additionalProperties", True)
        parts = {name: part for name, part in schema.get("properties", {}).items() if part is not False}
        parts |= {name: rest for name in required if name not in parts and rest is not False}
        names = {name: written for name in parts if (written := self.name(name)) is not None}
        lowered: dict[str, Any] = {"type": "object"}
        if names:
            lowered["properties"] = {written: self.lower(parts[name]) for name, written in names.items()}
            lowered["required"] = [names[name] for name in required if name in names]
        elif isinstance(rest, dict) and rest:
            lowered["additionalProperties"] = self.lower(rest)
        return lowered
