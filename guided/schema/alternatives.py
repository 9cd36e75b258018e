"""Alternatives of a schema in the library's form: `oneOf` is replaced where the library could not replace it.

The library replaces `oneOf` by alternatives, each without the values of the others, unless they are recursive or
`not` would be left. Here, each alternative is merged with what stands beside `oneOf`, and objects are told apart by
the properties that they name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
from jsonschema_rs import CanonicalSchema
from jsonschema_rs.canonical import Satisfiability
from jsonschema_rs.canonical.json import to_string

from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema.graph import children
from guided.schema.keywords import MISSPELT, OTHERS, at, listed, types_of
from guided.schema.numbers import numbers_of
from guided.schema.validation import PATTERNS, Validator

KEYWORDS = {*MISSPELT, *OTHERS}
_CLOSING = ("propertyNames", "additionalProperties")
_PLAIN = {"type", "properties", "required", "minProperties", "maxProperties", *_CLOSING}
FRACTIONS = {"type": "number", "not": {"multipleOf": 1}}
"""What the library adds to other types for a value of another alternative of `oneOf`. No library enforces it."""
_MAX_PARTS = 120
"""Maximum number of alternatives of a `oneOf` that are told apart: each is compared with each."""
_MAX_FORMS = 1_000
"""Maximum number of forms of parts that are computed for one document."""


class Alternatives:
    """The library's form of a document, of which parts are combined.

    Args:
        library: the form as an object or a boolean.
        draft: identifier of its draft.
    """

    def __init__(self, library: Any, draft: str) -> None:
        self._library = library
        self._draft = draft
        self._definitions = {name: library[name] for name in ("$defs", "definitions") if name in library}
        self._forms: dict[frozenset[str], Any] = {}
        """What `merged` returned."""

    def unfolded(self, part: Any) -> Any:
        """Return the target of a reference of the library: it merges no recursive references."""
        while isinstance(part, dict) and part.keys() == {"$ref"} and part["$ref"].startswith("#/"):
            part = at(self._library, unquote(part["$ref"][1:]))
        return part

    def merged(self, parts: list[Any]) -> Any:
        """Return the library's form of the values that satisfy all of `parts`; False if it finds none."""
        key = frozenset(map(json.dumps, parts))
        if key not in self._forms:
            if len(self._forms) == _MAX_FORMS:
                raise UnsupportedConstraint("the schema has too many alternatives")
            whole = {**self._definitions, "allOf": [self.unfolded(part) for part in parts]}
            form = canonicalize(whole, self._draft)
            is_empty = form.satisfiability() == Satisfiability.NO
            if is_empty:
                schema = False
            else:
                schema = json.loads(to_string(form.to_json_schema()))
            if schema is True:
                self._forms[key] = {}
            else:
                self._forms[key] = without_frame(self._filtered(schema))
        return self._forms[key]

    def _filtered(self, schema: Any) -> Any:
        """Return those of the listed values that satisfy `allOf`, where one of its parts lists values, or has few."""
        if isinstance(schema, bool) or "allOf" not in schema:
            return schema
        for values in filter(None, map(_values, [schema, *schema["allOf"]])):
            validator = Validator({**schema, "$schema": self._draft})
            kept = [value for value in values if validator.violation(value) is None]
            if kept:
                return {"enum": kept}
            return False
        return schema

    def of(self, schema: Any, context: Any = True, *, exclusive: bool = True) -> list[Any]:
        """Return schemas without `oneOf` that have together the values of `schema` and `context`.

        Args:
            exclusive: whether a value satisfies only one alternative of each `oneOf`, and not at least one.

        Raises:
            UnsupportedConstraint: not possible.
        """
        schema = without_frame(self.unfolded(schema))
        if schema is True:
            schema = {}
        if isinstance(schema, dict) and "oneOf" in schema and len(schema) > 1:
            siblings = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
            inner = self.merged([siblings] if context is True else [siblings, context])
            if inner is False:
                return []
            return self.of({"oneOf": schema["oneOf"]}, inner, exclusive=exclusive)
        match schema:
            case {"oneOf": parts} if len(schema) == 1 and exclusive:
                return list(self._exclusive(parts, context))
            case {"anyOf": parts} | {"oneOf": parts} if len(schema) == 1:
                return [inner for part in parts for inner in self.of(part, context, exclusive=exclusive)]
            case {"allOf": parts} if len(schema) == 1:
                whole = self.merged([*parts, context])
                if isinstance(whole, bool) or "allOf" not in whole:
                    if whole is False:
                        return []
                    return [whole]
                contexts = [context]
                for part in parts:
                    contexts = [inner for outer in contexts for inner in self.of(part, outer, exclusive=exclusive)]
                return contexts
        if context is True:
            whole = self._filtered(schema)
        else:
            whole = self.merged([schema, context])
        if whole is False:
            return []
        return [whole]

    def _exclusive(self, parts: list[Any], context: Any) -> Iterator[Any]:
        """Yield alternatives for the values of `context` that satisfy exactly one of `parts`."""
        if len(parts) > _MAX_PARTS:
            raise UnsupportedConstraint(f"'oneOf' has more than {_MAX_PARTS} alternatives")
        groups = [self.of(part, context) for part in parts]
        wholes = [self.of(part, context, exclusive=False) for part in parts]
        for index, group in enumerate(groups):
            others = [other for place, rest in enumerate(groups) if place != index for other in rest]
            kept = [found for own in group if (found := self._without(own, others)) is not False]
            for whole in (whole for place, rest in enumerate(wholes) if place != index for whole in rest):
                if whole not in others and any(self.merged([part, whole]) is not False for part in kept):
                    raise UnsupportedConstraint("an alternative of 'oneOf' has values of another 'oneOf'")
            yield from [parts[index]] if context is True and kept == group else kept

    def _without(self, own: Any, others: list[Any]) -> Any:
        """Return `own` without the values of `others`; False if there is none."""
        others = [other for other in others if not self._is_apart(own, other)]
        others = [other for other in others if self.merged([own, other]) is not False]
        if not others:
            return own
        rest = self.merged([own, *(self._excluding(own, other) for other in others)])
        if rest is False:  # too much may be excluded
            rest = self.merged([own, *({"not": other} for other in others)])
        if _is_negated(rest) and not _is_negated(own):
            raise UnsupportedConstraint("the alternatives of 'oneOf' can't be told apart")
        return rest

    def _is_apart(self, own: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether both have other types, or list other strings as the values of a required property."""
        if types_of(own).isdisjoint(types_of(other)):
            return True
        for name in own.get("required", ()):
            values = self._strings(own, name)
            others = self._strings(other, name)
            if values and others and values.isdisjoint(others):
                return own.get("type") == "object"
        return False

    def _strings(self, schema: dict[str, Any], name: str) -> set[str]:
        """Return the listed values of a property; none if one of them is no string."""
        values = listed(self.unfolded(schema.get("properties", {}).get(name, True))) or ()
        if all(isinstance(value, str) for value in values):
            return set(values)
        return set()

    def _excluding(self, own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """Return a schema that excludes the values of `other` from `own`.

        It may exclude more: values with properties that `other` requires, and `own` does not name.
        """
        properties = own.get("properties", {})
        named = other.get("properties", {})
        names = {*properties, *own.get("required", ())}
        allowed = listed(other.get("propertyNames", {"enum": []}))
        if not names or allowed is None or not other.keys() <= _PLAIN:
            return {"not": other}
        rest = other.get("additionalProperties", True)
        if "propertyNames" in other:
            named = dict.fromkeys(allowed, rest) | named
            rest = False
        parts = {name: named.get(name, rest) for name in sorted(names)}
        differing = {name: self.unfolded(part) for name, part in parts.items() if part != properties.get(name, True)}
        closed = listed(own.get("propertyNames", True))
        if closed is None:
            is_exact = rest is True and names.issuperset(named)
        else:
            is_exact = names.issuperset(closed)
        if not is_exact and names.issuperset(other.get("required", ())):
            return {"not": other}
        kept = {keyword: value for keyword, value in other.items() if keyword not in _CLOSING}
        return {"not": {**kept, "properties": differing}}


def _values(schema: Any) -> list[Any] | None:
    """Return the values of a schema that lists them, and integers between near bounds; None for others."""
    if isinstance(schema, dict) and schema.get("type") == "integer":
        numbers = numbers_of(schema, "integer")
        if numbers.are_few:
            return list(numbers.units)
    return listed(schema)


def canonicalize(schema: dict[str, Any], draft: str) -> CanonicalSchema:
    """Return the library's form of a schema. Raises InvalidConstraint if the library does not take it."""
    try:
        return jsonschema_rs.canonicalize(
            {**schema, "$schema": draft}, validate_formats=True, pattern_options=PATTERNS, offline=True
        )
    except ValueError as error:
        raise InvalidConstraint(f"the schema can't be read: {bounded(error)}", param="json_schema") from None


def without_frame(schema: Any) -> Any:
    """Return a schema without its identifier and definitions."""
    if isinstance(schema, bool):
        return schema
    return {key: value for key, value in schema.items() if key in KEYWORDS}


def _is_negated(schema: Any) -> bool:
    """Return whether what no library enforces is left in a form: `not` of anything but strings, or `contains`."""
    if not isinstance(schema, dict) or schema == FRACTIONS:
        return False
    is_negated = "contains" in schema or ("not" in schema and schema.get("type") != "string")
    return is_negated or any(_is_negated(child) for _, child, _ in children(schema))
