"""The strings that a subschema in canonical form allows, and those that it does not, as one `pattern`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from guided import regex
from guided.errors import UnsupportedConstraint
from guided.regex import UNIVERSE, Chars, Node
from guided.schema import automaton, string_pattern
from guided.schema.formats import FORMATS, NECESSARY
from guided.schema.keywords import Schema, listed, types_of

_ANY = regex.repeat(Chars(UNIVERSE), 0, None)


def pattern_of(schema: Schema) -> str:
    """Return a pattern for the strings that satisfy `schema`.

    Raises:
        UnsupportedConstraint: `schema` has keywords other than those for strings.
        InvalidConstraint: a pattern is malformed.
    """
    return _whole(_strings(schema))


def complement_of(schema: Schema) -> str:
    """Return a pattern for the strings that do not satisfy `schema`. Raises as `pattern_of` does."""
    try:
        return _whole(_complement(_strings(schema, exact=True)))
    except RecursionError:
        raise UnsupportedConstraint("the pattern is too deep to be negated") from None


def without(pattern: str, names: Iterable[str]) -> str:
    """Return a pattern for the strings that contain a match of `pattern` and are not in `names`. Raises as above."""
    listed = automaton.of(regex.choice(map(regex.literal, names)))
    return _whole(automaton.texts(automaton.of(string_pattern.read(pattern)).difference(listed)))


def _whole(node: Node) -> str:
    return f"^(?:{regex.render(node)})$"


def _strings(schema: Schema, *, exact: bool = False) -> Node:
    """Return the strings that satisfy `schema`. `exact`: all of them (our patterns of a `format` match fewer)."""
    if schema is True or schema == {}:
        return _ANY
    if isinstance(schema, dict) and "string" in types_of(schema):
        literals = [regex.literal(value) for value in listed(schema) or () if isinstance(value, str)]
        if literals:
            return regex.choice(literals)
        if schema.keys() == {"anyOf"}:
            return regex.choice(_strings(part, exact=exact) for part in schema["anyOf"])
        formats = NECESSARY if exact else FORMATS
        if schema.keys() <= {"type", "pattern", "minLength", "maxLength", "format"}:
            pattern = schema.get("pattern", formats.get(schema.get("format", "")))
            if not {"pattern", "format"} <= schema.keys() and ("format" not in schema or pattern is not None):
                node = _ANY if pattern is None else string_pattern.read(pattern)
                most: Any = schema.get("maxLength")
                return string_pattern.fit(node, int(schema.get("minLength", 0)), None if most is None else int(most))
        if schema.keys() <= {"type", "not"}:
            return _complement(_strings(schema["not"], exact=True))
    raise UnsupportedConstraint("these strings can't be described by one pattern")


def _complement(node: Node) -> Node:
    """Return all other strings."""
    return automaton.texts(automaton.of(node).everythingbut())
