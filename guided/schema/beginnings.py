"""What is wrong with the beginning of a document, whatever follows it.

`jsonschema-rs` validates the beginning as if it were whole. Of its errors, those are *final* that no continuation
mends: a value that is complete and invalid, two equal items, a key that must not be.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import regex

from guided.errors import ConstraintNotMet
from guided.schema.graph import NAMED, Node, SchemaGraph
from guided.schema.keywords import Schema
from guided.schema.validation import Validator, described, keyword_of

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

Path = list[str | int]
Nodes = tuple[Node, ...]
Place = Literal["value", "key", "string"]
"""A place in a document: after a value, after a key, or within a string."""
_PARTS = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "contains"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
)
"""Keywords with subschemas for members and items."""
_FINAL = ("maxItems", "maxProperties", "propertyNames", "additionalProperties", "type")
"""Keywords that an open object or array violates for ever."""
_UNSAFE = re.compile(r"\(\?<?!.*(?:\$|\\[bB])|\\[pPs]", re.DOTALL)
"""Matches patterns of which a partial match can't be trusted: a negative lookaround sees the end of the text, or there
are classes with characters beyond ASCII."""
_TIMEOUT = 0.01
"""Seconds for one comparison of a text with a pattern."""


class Beginnings:
    """Validates the beginnings of documents of one schema.

    Args:
        checked: JSON pointers of keywords, or of subschemas, that the mask does not enforce.
        place: of the schema within a structural tag: the beginning of the pointers in errors.

    Raises:
        ValueError: the schema cannot be validated.
    """

    def __init__(self, schema: Schema, checked: Collection[str], place: str = "") -> None:
        self.validator = Validator(schema)
        """Of whole documents."""
        self._schema = schema if isinstance(schema, dict) else {}
        self._places, self._place = checked, place

    @cached_property
    def _graph(self) -> SchemaGraph:
        return SchemaGraph(self._schema)

    @cached_property
    def around(self) -> Nodes:
        """Subschemas that apply to an array with the document as its only item."""
        return (Node({}, None, (), parts=[self._graph.root]),)

    @cached_property
    def _checked(self) -> set[Node]:
        places = {node.pointer(): node for node in self._graph.nodes()}
        places |= {node.pointer(keyword): node for node in self._graph.nodes() for keyword in node.schema}
        return {places.get(place, self._graph.root) for place in self._places}

    def below(self, nodes: Nodes, key: str | int) -> Nodes:
        """Return the subschemas that apply to a member or an item, or may."""
        parts = (part for node in nodes for part in node.parts)
        return _closure([part for part in parts if part.path[:1] != ("properties",) or part.path[1] == key])

    def is_checked(self, nodes: Nodes) -> bool:
        """Return whether one of these subschemas has a keyword that the mask does not enforce."""
        return not self._checked.isdisjoint(nodes)

    def error(self, document: Any, path: Path | None, place: Place) -> ConstraintNotMet | None:
        """Return what is finally wrong with a beginning.

        Args:
            document: the beginning. Objects and arrays may be open. After a key, its value is None.
            path: the keys and indices of what is open: the innermost object or array, the value of the key, or the
                string. None: the document is whole.
        """
        try:
            errors = self.validator.errors(document)
            error = next((error for error in errors if _is_final(error, path, place)), None)
        except (ValueError, RecursionError):
            return None  # the validation at the end says so
        return None if error is None else self.located(described(error))

    def located(self, error: ConstraintNotMet) -> ConstraintNotMet:
        """Return an error about the schema with its pointer in the structural tag."""
        if self._place:
            error.param, error.pointer = "structural_tag", self._place + (error.pointer or "")
        return error


def _closure(nodes: list[Node]) -> Nodes:
    for node in nodes:  # grows
        nodes += [child for _, child in node.same if child not in nodes]
    return tuple(nodes)


def _is_dead(pattern: str, text: str) -> bool:
    """Return whether no text that begins like `text` has a match of `pattern`."""
    if _UNSAFE.search(pattern):
        return False
    try:
        return regex.search(pattern, text, regex.ASCII, partial=True, timeout=_TIMEOUT) is None
    except (regex.error, TimeoutError):
        return False


def _is_final(error: ValidationError, path: Path | None, kind: Place) -> bool:
    """Return whether no continuation mends an error of a beginning."""
    if path is None:
        return True
    place, keyword = error.instance_path, keyword_of(error)
    if _depends(error, path):
        return False
    if place != path[: len(place)]:
        return True  # the value is complete
    if keyword in ("anyOf", "oneOf"):
        branches: list[list[ValidationError]] = error.kind.as_dict()["context"]
        return all(any(_is_final(inner, path, kind) for inner in branch) for branch in branches)
    if place == path and kind == "key":
        return False
    if place == path and kind == "string":
        return keyword == "pattern" and _is_dead(error.kind.as_dict()["pattern"], str(error.instance))
    return keyword in _FINAL or (keyword == "uniqueItems" and place == path)


def _depends(error: ValidationError, path: Path) -> bool:
    """Return whether an error depends on the condition of an `if` for an open value."""
    depth = 0
    steps = iter(error.evaluation_path)
    for step in steps:
        if step in ("then", "else") and error.instance_path[:depth] == path[:depth]:
            return True
        depth += step in _PARTS
        if step in NAMED:
            next(steps, None)  # a name
    return False
