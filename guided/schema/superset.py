"""Supersets of a JSON schema, for a library that does not enforce all of it: the schema without some keywords.

Whatever satisfies the schema satisfies the superset. The whole document is validated before it may end
(`guided/backends/checked.py`), so what is left out here is *checked*.
"""

from __future__ import annotations

from typing import Any

from guided.schema.pointer import escape, pointer

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords with a subschema for each name."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "extends")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "disallow"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_TOGETHER = (
    ("contains", "minContains", "maxContains"),
    ("if", "then", "else"),
    ("patternProperties", "additionalProperties", "unevaluatedProperties"),
    ("prefixItems", "items", "additionalItems", "unevaluatedItems"),
)
"""Keywords of which the later ones depend on the first one: without it, they would exclude more."""
_NEGATIVE = ("not", "disallow", "if", "oneOf")
"""Keywords with subschemas that exclude values: a superset of such a subschema would exclude more."""
_TIERS = (
    ("uniqueItems", "contains", "minProperties", "maxProperties"),
    ("unevaluatedProperties", "unevaluatedItems", "propertyNames", "dependentSchemas", "if", "not", "oneOf"),
    ("dependencies", "dependentRequired", "patternProperties"),
)
"""Keywords to leave out everywhere, step by step, where a refusal does not say which one."""
_FRAME = ("$schema", "$id", "id", "$defs", "definitions", "$anchor", "$dynamicAnchor", "properties")
"""What can't be left out: other parts refer to it, or depend on it."""
_SINGLE_DROPS = 8
"""Number of keywords that are left out one by one, before each further one is left out everywhere."""


class Superset:
    """The keywords that are left out of one schema.

    Args:
        document: the schema as sent.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._places: set[str] = set()
        """Pointers of keywords to leave out."""
        self._names: set[str] = set()
        """Keywords to leave out everywhere."""
        self._tier = 0
        self.checked: list[str] = []
        """Pointers of the keywords that `schema` has left out."""

    def leave_out(self, place: str | None) -> bool:
        """Leave out one more keyword.

        Args:
            place: pointer of a keyword that a library refuses. None, or the pointer of something else: take the next
                of the keywords that libraries refuse most.

        Returns:
            False if nothing is left that could be left out.
        """
        found = None if place is None else self._find(place)
        if found is not None and found not in self._places and found.rpartition("/")[2] not in self._names:
            if len(self._places) < _SINGLE_DROPS:
                self._places.add(found)
            else:
                self._names.add(found.rpartition("/")[2])
            return True
        if self._tier == len(_TIERS):
            return False
        self._names.update(_TIERS[self._tier])
        self._tier += 1
        return True

    def schema(self) -> dict[str, Any]:
        """Return the schema without the keywords that are left out. Sets `checked`."""
        self.checked = []
        relaxed = self._relaxed(self._document, "")
        assert isinstance(relaxed, dict)
        return relaxed

    def _find(self, place: str) -> str | None:
        """Return the pointer of the keyword at `place` in the document; None if there is none."""
        part: Any = self._document
        path: list[str | int] = []
        for token in place.removeprefix("/").split("/") if place else ():
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict) and name == "anyOf" and "anyOf" not in part and "oneOf" in part:
                name = "oneOf"  # which it replaces
            if isinstance(part, dict) and name in part:
                path.append(name)
                part = part[name]
            elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
                path.append(int(name))
                part = part[int(name)]
            else:
                return None
        is_keyword = bool(path) and (len(path) < 2 or path[-2] not in _MAPS) and isinstance(path[-1], str)
        return pointer(path) if is_keyword and path[-1] not in _FRAME else None

    def _relaxed(self, schema: Any, place: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        left_out = {name for name in schema if name in self._names or f"{place}/{escape(name)}" in self._places}
        values = {name: self._value(name, value, f"{place}/{escape(name)}") for name, value in schema.items()}
        left_out |= {name for name in _NEGATIVE if name in schema and self._excludes_more(schema[name], values[name])}
        for first, *others in _TOGETHER:
            if first in left_out:
                left_out.update(others)
        self.checked += [f"{place}/{escape(name)}" for name in schema if name in left_out]
        kept = {name: value for name, value in values.items() if name not in left_out}
        if "oneOf" in left_out:  # at least one of them is still necessary
            kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": values["oneOf"]}]
        return kept

    def _value(self, name: str, value: Any, place: str) -> Any:
        if name in _MAPS and isinstance(value, dict):
            return {key: self._relaxed(part, f"{place}/{escape(key)}") for key, part in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self._relaxed(part, f"{place}/{index}") for index, part in enumerate(value)]
        return self._relaxed(value, place) if name in _SINGLE else value

    def _excludes_more(self, before: Any, after: Any) -> bool:
        """Return whether a subschema that excludes values may exclude more since keywords were left out."""
        return before != after or (bool(self._names or self._places) and "'$ref'" in repr(before))
