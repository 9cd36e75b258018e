"""The result of normalisation: a schema in normal form with its definitions, and where each part came from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from guided.schema.instances import enforcing
from guided.schema.keywords import Schema, parts_of


@dataclass(slots=True)
class NormalForm:
    """A schema in normal form; `root` refers to `definitions` as "#/$defs/<name>"."""

    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    disjoint: Callable[[Schema, Schema], bool] = lambda left, right: False
    """Whether it is certain that no value satisfies both."""
    _origins: dict[int, tuple[Schema, str]] = field(default_factory=dict)
    """By `id`; the reference to the subschema prevents another use of the `id`."""

    def pointer(self, schema: Schema) -> str:
        """Return the JSON pointer of `schema` in the user's document; "" if it is not known."""
        return self._origins.get(id(schema), (None, ""))[1]

    def note(self, schema: Schema, pointer: str) -> None:
        """Record that `schema` came from `pointer`, unless it already has a pointer."""
        if pointer and isinstance(schema, dict) and not self.pointer(schema):
            self._origins[id(schema)] = (schema, pointer)

    def note_copy(self, original: Schema, copy: Schema) -> None:
        """Record that `copy` came from where `original` did."""
        self.note(copy, self.pointer(original))

    def target(self, schema: dict[str, Any]) -> Schema:
        """Return the target of a `$ref` in normal form."""
        return self.definitions[target_name(schema)]

    def alternatives(self, schema: Schema, keywords: Collection[str] = ("anyOf",)) -> list[Schema]:
        """Return the alternatives of a subschema without `$ref` and `anyOf`, in order.

        Args:
            keywords: where alternatives are listed. With `allOf`, also what applies together.
        """
        found: list[Schema] = []
        todo, seen = [schema], set()
        while todo:
            one = todo.pop()
            if isinstance(one, dict) and "$ref" in one:
                if one["$ref"] not in seen:
                    seen.add(one["$ref"])
                    todo.append(self.target(one))
            elif isinstance(one, dict) and (listing := one.keys() & keywords):
                todo.extend(reversed(one[listing.pop()]))
            else:
                found.append(one)
        return found

    def validator(self, schema: Schema) -> Any:
        """Return a validator of `jsonschema` for a subschema; it refers to the definitions."""
        return enforcing(Draft202012Validator)({"$defs": self.definitions, "allOf": [schema]})


def reference(name: str) -> dict[str, Any]:
    """Return a `$ref` to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def target_name(schema: dict[str, Any]) -> str:
    """Return the name of the definition that a `$ref` in normal form refers to."""
    name: str = schema["$ref"].removeprefix("#/$defs/")
    return name


def references(schema: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a subschema in normal form refers to."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if "$ref" in part:
                yield target_name(part)
            todo.extend(parts_of(part))
