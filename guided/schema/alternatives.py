"""Alternatives of a schema in the library's form: `oneOf` is replaced where the library
could not replace it.

The library replaces `oneOf` by alternatives, each without the values of the others,
unless they are recursive or `not` would be left. Here, each alternative is merged with
what stands beside `oneOf`, and objects are told apart by the properties that they name.
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
from guided.json_text import JsonObject
from guided.schema.graph import children
from guided.schema.keywords import KEYWORDS, Schema, at, listed, types_of
from guided.schema.numbers import numbers_of
from guided.schema.validation import PATTERNS, Validator

CLOSING = ("propertyNames", "additionalProperties")
_PLAIN = {"type", "properties", "required", "minProperties", "maxProperties", *CLOSING}
FRACTIONS = {"type": "number", "not": {"multipleOf": 1}}
"""What the library adds to other types for a value of another alternative of `oneOf`.
No library enforces it."""
_MAX_PARTS = 120
"""Maximum number of alternatives of a `oneOf` that are told apart: each is compared
with each."""
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
        self._definitions = {
            name: library[name] for name in ("$defs", "definitions") if name in library
        }
        self._forms: dict[frozenset[str], Any] = {}
        """What `merged` returned."""

    def unfolded(self, part: Any) -> Any:
        """Return the target of a reference of the library: it merges no recursive
        references."""
        while (
            isinstance(part, dict)
            and part.keys() == {"$ref"}
            and part["$ref"].startswith("#/")
        ):
            part = at(self._library, unquote(part["$ref"][1:]))
        return part

    def merged(self, parts: list[Any]) -> Any:
        """Return the library's form of the values that satisfy all of `parts`; False if
        it finds none."""
        key = frozenset(map(json.dumps, parts))
        if key not in self._forms:
            if len(self._forms) == _MAX_FORMS:
                raise UnsupportedConstraint("the schema has too many alternatives")
            whole = {
                **self._definitions,
                "allOf": [self.unfolded(part) for part in parts],
            }
            form = canonicalize(whole, self._draft)
            schema: Schema = False
            if form.satisfiability() != Satisfiability.NO:
                schema = json.loads(to_string(form.to_json_schema()))
            if schema is True:
                schema = {}
            self._forms[key] = without_frame(self._filtered(schema))
        return self._forms[key]

    def _filtered(self, schema: Any) -> Any:
        """Return those of the listed values that satisfy `allOf`, where one of its
        parts lists values, or has few."""
        if isinstance(schema, bool) or "allOf" not in schema:
            return schema
        for values in filter(None, map(_values, [schema, *schema["allOf"]])):
            validator = Validator({**schema, "$schema": self._draft})
            kept = [value for value in values if validator.violation(value) is None]
            if kept:
                return {"enum": kept}
            return False
        return schema

    def of(
        self, schema: Any, context: Any = True, *, exclusive: bool = True
    ) -> list[Any]:
        """Return schemas without `oneOf` that have together the values of `schema` and
        `context`.

        Args:
            exclusive: whether a value satisfies only one alternative of each `oneOf`,
                and not at least one.

        Raises:
            UnsupportedConstraint: not possible.
        """
        schema = without_frame(self.unfolded(schema))
        if schema is True:
            schema = {}
        match schema:
            case {"oneOf": parts} if len(schema) == 1 and exclusive:
                return list(self._exclusive(parts, context))
            case {"anyOf": parts} | {"oneOf": parts} if len(schema) == 1:
                return [
                    inner
                    for part in parts
                    for inner in self.of(part, context, exclusive=exclusive)
                ]
            case {"allOf": parts} if len(schema) == 1:
                whole = self.merged([*parts, context])
                if whole is False:
                    return []
                if "allOf" not in whole:
                    return [whole]
                contexts = [context]
                for part in parts:
                    contexts = [
                        inner
                        for outer in contexts
                        for inner in self.of(part, outer, exclusive=exclusive)
                    ]
                return contexts
        if context is True:
            whole = self._filtered(schema)
        else:
            whole = self.merged([schema, context])
        if whole is False:
            return []
        return [whole]

    def _exclusive(self, parts: list[Any], context: Any) -> Iterator[Any]:
        """Yield alternatives for the values of `context` that satisfy exactly one of
        `parts`."""
        if len(parts) > _MAX_PARTS:
            raise UnsupportedConstraint(
                f"'oneOf' has more than {_MAX_PARTS} alternatives"
            )
        groups = [self.of(part, context) for part in parts]
        wholes = [self.of(part, context, exclusive=False) for part in parts]
        for index, group in enumerate(groups):
            others = [
                other
                for place, rest in enumerate(groups)
                if place != index
                for other in rest
            ]
            narrowed = [self._without(alternative, others) for alternative in group]
            kept = [alternative for alternative in narrowed if alternative is not False]
            excluded = [
                other
                for place, whole in enumerate(wholes)
                if place != index
                for other in whole
            ]
            for other in excluded:
                if other not in others and any(
                    self.merged([part, other]) is not False for part in kept
                ):
                    raise UnsupportedConstraint(
                        "an alternative of 'oneOf' has values of another 'oneOf'"
                    )
            yield from [parts[index]] if context is True and kept == group else kept

    def _without(self, alternative: Any, others: list[Any]) -> Any:
        """Return `alternative` without the values of `others`; False if there is
        none."""
        others = [other for other in others if not self._is_apart(alternative, other)]
        others = [
            other for other in others if self.merged([alternative, other]) is not False
        ]
        if not others:
            return alternative
        rest = self.merged(
            [alternative, *(self._excluding(alternative, other) for other in others)]
        )
        if rest is False:  # too much may be excluded
            rest = self.merged([alternative, *({"not": other} for other in others)])
        if _is_negated(rest) and not _is_negated(alternative):
            raise UnsupportedConstraint(
                "the alternatives of 'oneOf' can't be told apart"
            )
        return rest

    def _is_apart(self, alternative: JsonObject, other: JsonObject) -> bool:
        """Return whether one is an object, and the other is none or lists other values
        of a required property."""
        if types_of(alternative) != {"object"}:
            return False
        if "object" not in types_of(other):
            return True
        for name in alternative.get("required", ()):
            values = self._strings(alternative, name)
            others = self._strings(other, name)
            if values and others and values.isdisjoint(others):
                return True
        return False

    def _strings(self, schema: JsonObject, name: str) -> set[str]:
        """Return the listed values of a property; none if one of them is no string."""
        values = (
            listed(self.unfolded(schema.get("properties", {}).get(name, True))) or []
        )
        texts = {value for value in values if isinstance(value, str)}
        if len(texts) < len(values):
            return set()
        return texts

    def _excluding(self, alternative: JsonObject, other: JsonObject) -> JsonObject:
        """Return a schema that excludes the values of `other` from `alternative`.

        It may exclude more: values with properties that `other` requires, and
        `alternative` does not name.
        """
        properties = alternative.get("properties", {})
        named = other.get("properties", {})
        names = {*properties, *alternative.get("required", ())}
        allowed = listed(other.get("propertyNames", {"enum": []}))
        if not names or allowed is None or not other.keys() <= _PLAIN:
            return {"not": other}
        rest = other.get("additionalProperties", True)
        if "propertyNames" in other:
            named = dict.fromkeys(allowed, rest) | named
            rest = False
        parts = {name: named.get(name, rest) for name in sorted(names)}
        differing = {
            name: self.unfolded(part)
            for name, part in parts.items()
            if part != properties.get(name, True)
        }
        closed = listed(alternative.get("propertyNames", True))
        is_exact = rest is True and names.issuperset(named)
        if closed is not None:
            is_exact = names.issuperset(closed)
        if not is_exact and names.issuperset(other.get("required", ())):
            return {"not": other}
        kept = {
            keyword: value for keyword, value in other.items() if keyword not in CLOSING
        }
        return {"not": {**kept, "properties": differing}}


def _values(schema: Any) -> list[Any] | None:
    """Return the values of a schema that lists them, and integers between near bounds;
    None for others."""
    if isinstance(schema, dict) and schema.get("type") == "integer":
        numbers = numbers_of(schema, "integer")
        if numbers.are_few:
            return list(numbers.units)
    return listed(schema)


def canonicalize(schema: JsonObject, draft: str) -> CanonicalSchema:
    """Return the library's form of a schema. Raises InvalidConstraint if the library
    does not take it."""
    try:
        return jsonschema_rs.canonicalize(
            {**schema, "$schema": draft},
            validate_formats=True,
            pattern_options=PATTERNS,
            offline=True,
        )
    except ValueError as error:
        raise InvalidConstraint(
            f"the schema can't be read: {bounded(error)}", param="json_schema"
        ) from None


def without_frame(schema: Any) -> Any:
    """Return a schema without its identifier and definitions."""
    if isinstance(schema, bool):
        return schema
    return {key: value for key, value in schema.items() if key in KEYWORDS}


def _is_negated(schema: Any) -> bool:
    """Return whether what no library enforces is left in a form: `not` of anything but
    strings, or `contains`."""
    if not isinstance(schema, dict) or schema == FRACTIONS:
        return False
    is_negated = "contains" in schema or (
        "not" in schema and schema.get("type") != "string"
    )
    return is_negated or any(_is_negated(child) for _, child, _ in children(schema))
