"""What is wrong with the beginning of a document, whatever follows it.

The beginning is closed (`{"a": [1, 1` becomes `{"a": [1, 1]}`) and validated by `jsonschema-rs`. Of its errors, those
are *final* that no continuation mends: a value that is complete and invalid, two equal items, a key that must not be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from guided.schema.graph import REFERENCES, Node, SchemaGraph
from guided.schema.keywords import NUMERIC, Schema
from guided.errors import ConstraintNotMet
from guided.schema.validation import Validator, described, keyword_of

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

Path = list[str | int]
Patterns = list[list[str]]
"""A text matches one of each list."""
PlaceKind = Literal["begin", "end", "key", "comma", "within"]
"""A place in a document: after the first character of a value, after a value, a key, a comma; another one."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords with subschemas by name."""
_MEMBERS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems")
_OF_WHOLE = frozenset(
    (*NUMERIC, "uniqueItems", "minItems", "maxItems", "contains", "minContains", "maxContains", "minProperties")
    + ("maxProperties", "propertyNames", "required", "pattern", "format", "minLength", "maxLength")
)
"""Keywords that no value within an open one violates."""
_COUNTS = ("maxItems", "maxProperties")
_OTHERS = ("properties", "patternProperties", "prefixItems")
"""Keywords for members and items to which `additionalProperties` and `items` do not apply."""
_FINAL = ("maxItems", "maxProperties", "propertyNames", "additionalProperties", "type")
"""Keywords that an open value violates for ever."""
_LOOKS_AROUND = re.compile(r"\(\?<?!")
ANY_OTHER = "\uffff"
"""A character that stands for each one beyond ASCII."""
_ASCII = re.compile(r"(?:[^\\\x80-\U0010ffff]|\\[^pPuxUN])*")
"""Matches patterns that treat all characters beyond ASCII alike."""
_TIMEOUT = 0.01
"""Seconds for one comparison of a text with a pattern."""
_KEPT = 256
"""Maximum number of members of which `Applied.below` is kept."""


@dataclass(eq=False)
class Applied:
    """The subschemas that apply to one value, or may."""

    nodes: dict[Node, bool]
    """True: it applies, whatever follows."""
    is_checked: bool
    """One of them has a keyword that the mask does not enforce."""
    is_bounded: bool
    """It is a bound on the number of members or items."""
    is_loose: bool
    """It says something of the members and items, too."""
    texts: Patterns = field(default_factory=list)
    """Of a string."""
    names: Patterns = field(default_factory=list)
    """Of the keys of an object."""
    below: dict[str | int, Applied] = field(default_factory=dict)
    """What applies to members and items, by key or index."""


class Beginnings:
    """Validates the beginnings of documents of one schema.

    Args:
        checked: JSON pointers of keywords, or of subschemas, that the mask does not enforce.

    Raises:
        ValueError: the schema cannot be validated.
    """

    def __init__(self, schema: Schema, checked: Collection[str]) -> None:
        self.validator = Validator(schema)
        """Of whole documents."""
        self._schema = schema
        self._checked = checked

    @cached_property
    def root(self) -> Applied:
        """What applies to the whole document."""
        graph = SchemaGraph(self._schema if isinstance(self._schema, dict) else {})
        left = set(self._checked)
        self._marked: dict[Node, set[str]] = {}
        for node in graph.nodes():
            place = node.pointer()
            keywords = {keyword for keyword in node.schema if node.pointer(keyword) in left}
            if keywords or place in left:
                self._marked[node] = keywords
                left -= {place, *(node.pointer(keyword) for keyword in keywords)}
        if left:  # it is not known where they apply
            self._marked.setdefault(graph.root, set())
        return self._applied({graph.root: True})

    def below(self, applied: Applied, place: str | int) -> Applied:
        """Return what applies to a member or an item of a value."""
        known = applied.below.get(place)
        if known is not None:
            return known
        keywords = _MEMBERS if isinstance(place, str) else _ITEMS
        found: dict[Node, bool] = {}
        for node, certain in applied.nodes.items():
            for part in node.parts:
                keyword, *name = part.path
                if keyword not in keywords or (keyword == "properties" and name != [place]):
                    continue
                is_rest = keyword in ("items", "additionalProperties") and node.schema.keys().isdisjoint(_OTHERS)
                is_certain = certain and (is_rest or keyword == "properties")
                found[part] = found.get(part, False) or is_certain
        below = self._applied(found)
        if len(applied.below) < _KEPT:
            applied.below[place] = below
        return below

    def _applied(self, start: dict[Node, bool]) -> Applied:
        nodes: dict[Node, bool] = {}
        todo = list(start.items())
        for node, certain in todo:  # grows
            if nodes.get(node, False) < certain or node not in nodes:
                nodes[node] = certain
                inner = ((child, certain and keyword in ("allOf", *REFERENCES)) for keyword, child in node.same)
                todo.extend(inner)
        marked = [self._marked[node] for node in nodes if node in self._marked]
        is_bounded = any(not keywords.isdisjoint(_COUNTS) for keywords in marked)
        is_loose = any(not keywords or keywords.difference(_OF_WHOLE) for keywords in marked)
        found = Applied(nodes, bool(marked), is_bounded, is_loose)
        for node, certain in nodes.items():
            if certain:
                found.texts += _texts(node.schema)
                found.names += _names(node.schema)
        return found

    def violation(self, text: str, path: Path | None, kind: PlaceKind) -> ConstraintNotMet | None:
        """Return what is finally wrong with a beginning.

        Args:
            text: the beginning, closed.
            path: the keys and indices of the innermost open value. None: no value is open.
        """
        try:
            errors = self.validator.errors(json.loads(text))
            error = next((error for error in errors if _is_final(error, path, kind)), None)
        except (ValueError, RecursionError):
            return None  # the validation at the end says so
        return None if error is None else described(error)


def _texts(schema: dict[str, Any]) -> Patterns:
    """Return the patterns of the strings that satisfy a schema."""
    lists = [[schema["pattern"]]] if "pattern" in schema else []
    branches = schema.get("anyOf", [])
    if branches and all(isinstance(branch, dict) and "pattern" in branch for branch in branches):
        lists.append([branch["pattern"] for branch in branches])
    return [patterns for patterns in lists if all(map(_is_safe, patterns))]


def _names(schema: dict[str, Any]) -> Patterns:
    """Return the patterns of the keys of objects that satisfy a schema."""
    names = schema.get("propertyNames")
    lists = _texts(names) if isinstance(names, dict) else []
    if schema.get("additionalProperties") is False:
        named = "|".join(map(re.escape, schema.get("properties", ())))
        patterns = [f"^(?:{named})\\Z", *schema.get("patternProperties", ())]
        lists += [patterns] if all(map(_is_safe, patterns)) else []
    return lists


def matches(text: str, patterns: Sequence[str], *, partial: bool) -> bool:
    """Return whether one of `patterns` has a match in a text; with `partial`, whether a longer text may have one."""
    import regex  # only workers with such a schema need it

    if text.endswith(ANY_OTHER) and not all(map(_ASCII.fullmatch, patterns)):
        return True
    try:
        compiled = (regex.compile(pattern, regex.ASCII) for pattern in patterns)
        return any(pattern.search(text, partial=partial, timeout=_TIMEOUT) for pattern in compiled)
    except (regex.error, TimeoutError):
        return True


def _is_safe(pattern: str) -> bool:
    """Return whether partial matches can be trusted: not where a negative lookaround sees the end of the text."""
    return not (_LOOKS_AROUND.search(pattern) and ("$" in pattern or r"\b" in pattern.lower()))


def _is_final(error: ValidationError, path: Path | None, kind: PlaceKind) -> bool:
    """Return whether no continuation mends an error of the closed beginning."""
    if path is None:
        return True
    place, keyword = error.instance_path, keyword_of(error)
    if kind == "comma":
        return keyword in _COUNTS and place == path
    if _depends(error, path):
        return False
    if place != path[: len(place)]:
        return True  # the value is complete
    if place == path and kind == "key":
        return False  # the value is a placeholder
    if keyword in ("anyOf", "oneOf"):
        branches: list[list[ValidationError]] = error.kind.as_dict()["context"]
        return all(any(_is_final(inner, path, kind) for inner in branch) for branch in branches)
    if place == path and kind == "begin":
        return keyword == "type"
    if keyword == "uniqueItems":
        return place == path
    return keyword in _FINAL


def _depends(error: ValidationError, path: Path) -> bool:
    """Return whether an error depends on the condition of an `if` for an open value."""
    place, depth = error.instance_path, 0
    steps = iter(error.evaluation_path)
    for step in steps:
        if step in ("then", "else") and place[:depth] == path[:depth]:
            return True
        if step in _NAMED:
            next(steps, None)
        depth += step in _MEMBERS or step in _ITEMS or step == "contains"
    return False
