"""Order the properties of an instance as its schema does, because some grammars require
it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012


def in_schema_order(value: Any, schema: Any) -> Any:
    """Return a valid `value` with its properties in the order of the schema's text,
    which a grammar may require."""
    with suppress(Unresolvable, re.error):
        return _Order(schema).ordered(value, [schema])
    return value


class _Order:
    def __init__(self, root: Any) -> None:
        self._validator = validator_for(root, Draft202012Validator)(root)
        self._resolver = (
            Registry().with_resource("", DRAFT202012.create_resource(root)).resolver()
        )

    def ordered(self, value: Any, schemas: Iterable[Any]) -> Any:
        parts = [part for schema in schemas for part in self._parts(value, schema)]
        if isinstance(value, list):
            return [
                self.ordered(item, [_of_item(part, at) for part in parts])
                for at, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        known = [
            name
            for keyword in ("properties", "required")
            for part in parts
            for name in part.get(keyword, ())
        ]
        names = dict.fromkeys(name for name in (*known, *value) if name in value)
        return {
            name: self.ordered(value[name], _of_property(parts, name)) for name in names
        }

    def _parts(self, value: Any, schema: Any) -> Iterator[dict[str, Any]]:
        """Yield the schema, at the place of its `properties`, and its parts that
        `value` satisfies."""
        if not isinstance(schema, dict):
            return
        for keyword, content in {**schema, "properties": None}.items():
            if keyword == "properties":
                yield schema
            elif keyword == "$ref" and content.startswith("#"):
                yield from self._parts(value, self._resolver.lookup(content).contents)
            elif keyword in ("allOf", "anyOf", "oneOf", "then", "else"):
                for part in content if isinstance(content, list) else [content]:
                    if self._validator.evolve(schema=part).is_valid(value):
                        yield from self._parts(value, part)


def _of_item(part: dict[str, Any], index: int) -> Any:
    items = part.get("items")
    # a list before draft 2020-12
    prefix = items if isinstance(items, list) else part.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else items


def _of_property(parts: Iterable[dict[str, Any]], name: str) -> Iterator[Any]:
    for part in parts:
        yield part.get("properties", {}).get(name, part.get("additionalProperties"))
        yield from (
            schema
            for pattern, schema in part.get("patternProperties", {}).items()
            if re.search(pattern, name)
        )
