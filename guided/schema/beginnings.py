"""What is wrong with the beginning of a document, whatever follows it.

`jsonschema-rs` validates the beginning as if it were whole. Of its errors, those are
*final* that no continuation mends: a value that is complete and invalid, two equal
items, a key that must not be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import regex

from guided.errors import ConstraintNotMet
from guided.schema.graph import NAMED, PARTS, Node, SchemaGraph
from guided.schema.keywords import Schema, as_object
from guided.schema.validation import Validator, described, keyword_of

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

Path = list[str | int]
Place = Literal["first", "string", "value", "key"]
"""A place in a document: after the first character of a value, within a string, after a
value, or after a key."""
_FINAL = ("maxItems", "maxProperties", "propertyNames", "additionalProperties", "type")
"""Keywords that an open object or array violates for ever."""
_SHALLOW = {
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "const",
    "enum",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "uniqueItems",
    "minItems",
    "contains",
    "minContains",
    "maxContains",
}
"""Keywords that are violated, for ever, by a whole value only, by a key, or by a whole
member or item."""
_UNSAFE = re.compile(r"\(\?<?!.*(?:\$|\\[bB])|\\[pPs]", re.DOTALL)
"""Matches patterns of which a partial match can't be trusted: a negative lookaround
sees the end of the text, or there are classes with characters beyond ASCII."""
_INDEX = re.compile(r"\+?[0-9]{1,19}")
"""Matches keys that `jsonschema-rs` takes for indices in the path of an error."""
_TIMEOUT = 0.01
"""Seconds for one comparison of a text with a pattern."""


@dataclass(slots=True, eq=False)
class Part:
    """What applies to a value in a document, or may."""

    nodes: Sequence[Node] = ()
    """The subschemas, with those that they apply to the same value."""
    patterns: Sequence[str] = ()
    """The patterns of a string."""
    is_checked: bool = False
    """A keyword of one of them is not enforced by the mask."""
    is_deep: bool = False
    """Such a keyword may also be violated within a member or item."""

    def may_match(self, text: str) -> bool:
        """Return whether a string that begins like this may match all patterns."""
        return not any(_is_dead(pattern, text) for pattern in self.patterns)


class Beginnings:
    """Validates the beginnings of documents of one schema.

    Args:
        checked: JSON pointers of keywords, or of subschemas, that the mask does not
            enforce.
        place: of the schema within a structural tag: the beginning of the pointers in
            errors.

    Raises:
        ValueError: the schema cannot be validated.
    """

    def __init__(
        self, schema: Schema, checked: Collection[str], place: str = ""
    ) -> None:
        self._validator = Validator(schema)
        self._schema = as_object(schema)
        self._places = checked
        self._place = place
        self.below = lru_cache()(self._below)

    @cached_property
    def _graph(self) -> SchemaGraph:
        return SchemaGraph(self._schema)

    @cached_property
    def around(self) -> Part:
        """What applies to an array with the document as its only item."""
        return Part([Node({}, None, (), parts=[self._graph.root])])

    @cached_property
    def _checked(self) -> set[Node]:
        return self._with(self._places)

    @cached_property
    def _deep(self) -> set[Node]:
        """The nodes in `_checked` with a keyword that may be violated within a member
        or item."""
        places = [
            place for place in self._places if place.rpartition("/")[2] not in _SHALLOW
        ]
        if not places:
            return set()
        return self._with(places)

    def _with(self, places: Collection[str]) -> set[Node]:
        """Return the subschemas at these JSON pointers, and those with a keyword there.
        The root if there are none."""
        above = {place.rpartition("/")[0] for place in places}.union(places)
        return {node for node in self._graph.nodes() if node.pointer() in above} or {
            self._graph.root
        }

    def _below(self, part: Part, key: str | int) -> Part:
        """Return what applies to a member of an object, or to an item, where any index
        will do."""
        children = [child for node in part.nodes for child in node.parts]
        nodes = [
            node
            for node in children
            if node.path[:1] != ("properties",) or node.path[1] == key
        ]
        for node in nodes:  # grows
            nodes += [child for _, child in node.same if child not in nodes]
        patterns = [
            node.schema["pattern"] for node in nodes if "pattern" in node.schema
        ]
        return Part(
            nodes,
            patterns,
            not self._checked.isdisjoint(nodes),
            not self._deep.isdisjoint(nodes),
        )

    def error(
        self, document: Any, path: Path | None, place: Place
    ) -> ConstraintNotMet | None:
        """Return what is finally wrong with a beginning.

        Args:
            document: the beginning. Objects and arrays may be open. After a key, its
                value is None.
            path: the keys and indices of what is open: the innermost object or array,
                the value of the key, the string, or what has begun. None: the document
                is whole.
        """
        if path is not None:
            path = [
                int(key) if isinstance(key, str) and _INDEX.fullmatch(key) else key
                for key in path
            ]
        try:
            errors = self._validator.errors(document)
            error = next(
                (error for error in errors if _is_final(error, path, place)), None
            )
        except (ValueError, RecursionError):
            return None  # the validation at the end says so
        if error is None:
            return None
        return self._located(described(error))

    def violation(self, document: Any) -> ConstraintNotMet | None:
        """Return why a whole document violates the schema; None if it satisfies it."""
        violation = self._validator.violation(document)
        if violation is None:
            return None
        return self._located(violation)

    def _located(self, error: ConstraintNotMet) -> ConstraintNotMet:
        """Return an error about the schema with its pointer in the structural tag."""
        if self._place:
            error.param = "structural_tag"
            error.pointer = self._place + (error.pointer or "")
        return error


def _is_dead(pattern: str, text: str) -> bool:
    """Return whether no text that begins like `text` has a match of `pattern`."""
    try:
        safe = not _UNSAFE.search(pattern)
        return (
            safe
            and regex.search(pattern, text, regex.ASCII, partial=True, timeout=_TIMEOUT)
            is None
        )
    except (regex.error, TimeoutError):
        return False


def _is_final(error: ValidationError, path: Path | None, kind: Place) -> bool:
    """Return whether no continuation mends an error of a beginning."""
    if path is None:
        return True
    place = error.instance_path
    keyword = keyword_of(error)
    if _depends(error, path):
        return False
    if place != path[: len(place)]:
        return True  # the value is complete
    if keyword in ("anyOf", "oneOf"):
        branches: list[list[ValidationError]] = error.kind.as_dict()["context"]
        return all(
            any(_is_final(inner, path, kind) for inner in branch) for branch in branches
        )
    if place == path and kind == "key":
        return False
    if place == path and kind == "first":
        return keyword == "type"
    if place == path and kind == "string":
        return keyword == "pattern" and _is_dead(
            error.kind.as_dict()["pattern"], str(error.instance)
        )
    return keyword in _FINAL or (keyword == "uniqueItems" and place == path)


def _depends(error: ValidationError, path: Path) -> bool:
    """Return whether an error depends on the condition of an `if` for an open value."""
    depth = 0
    steps = iter(error.evaluation_path)
    for step in steps:
        if step in ("then", "else") and error.instance_path[:depth] == path[:depth]:
            return True
        depth += step in PARTS and step != "propertyNames"
        if step in NAMED:
            next(steps, None)  # a name
    return False
