"""Which subschemas in normal form have a finite instance? A value with required parts that refer back to it has none.

Found as the least fixed point over the definitions: at first none has an instance, then those that need no definition,
then those that need only these, and so on.
"""

from __future__ import annotations

from typing import Any

from guided.errors import InvalidConstraint
from guided.schema.form import NormalForm, target_name
from guided.schema.keywords import Schema, cleaned, map_parts, types_of


class FiniteInstances:
    """The definitions of a document that have a finite instance."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._finite: set[str] = set()
        while grown := {
            name for name, schema in definitions.items() if name not in self._finite and self.possible(schema)
        }:
            self._finite |= grown

    def possible(self, schema: Schema) -> bool:
        """Whether some finite value may satisfy `schema` (False is a proof that none does)."""
        if isinstance(schema, bool) or not schema:
            return schema is not False
        if "$ref" in schema:
            return target_name(schema) in self._finite
        if "allOf" in schema:
            return all(map(self.possible, schema["allOf"]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return any(map(self.possible, schema[keyword]))
        if "enum" in schema or "const" in schema:
            return True
        return any(self._possible_in(kind, schema) for kind in types_of(schema))

    def _possible_in(self, kind: str, schema: dict[str, Any]) -> bool:
        if kind == "array":
            prefix, least = schema.get("prefixItems", []), int(schema.get("minItems", 0))
            rest = [schema.get("items", True)] if least > len(prefix) else []
            return all(map(self.possible, [*prefix[:least], *rest]))
        if kind == "object":
            declared = schema.get("properties", {})
            return all(self.possible(declared.get(name, True)) for name in schema.get("required", ()))
        return True

    def without_impossible(self, schema: Schema) -> Schema:
        """Return `schema` with false in the place of every part that has no finite instance."""
        if isinstance(schema, bool) or not self.possible(schema):
            return schema is not False and self.possible(schema)
        kept = map_parts(schema, self.without_impossible)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(kept, dict) and keyword in kept:
                kept[keyword] = [part for part in kept[keyword] if part is not False]
                if len(kept[keyword]) == 1:
                    return kept[keyword][0]  # type: ignore[no-any-return]
        return cleaned(kept)


def exclude_infinite(form: NormalForm) -> None:
    """Exclude the parts that have no finite instance. A model that begins one could never end it.

    Raises:
        InvalidConstraint: the whole schema has none.
    """
    finite = FiniteInstances(form.definitions)
    impossible = [schema for schema in form.definitions.values() if not finite.possible(schema)]
    if not impossible:
        return
    infinite = [schema for schema in impossible if schema is not False]
    if infinite and form.root is not False and not finite.possible(form.root):
        at = next(filter(None, map(form.pointer, infinite)), "")
        message = "no finite value satisfies the schema: a required part of it refers back to the whole"
        raise InvalidConstraint(message, param="json_schema", pointer=at)
    for name, schema in form.definitions.items():
        form.definitions[name] = finite.without_impossible(schema)
        form.note_copy(schema, form.definitions[name])
    root = form.root
    form.root = finite.without_impossible(root)
    form.note_copy(root, form.root)
