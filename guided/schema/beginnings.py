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
from typing import TYPE_CHECKING, Any

from guided.schema.graph import REFERENCES, Node, SchemaGraph
from guided.schema.keywords import Schema
from guided.errors import ConstraintNotMet
from guided.schema.validation import Validator, described, keyword_of

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

Path = list[str | int]
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords with subschemas by name."""
_MEMBERS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems")
_COUNTS = ("maxItems", "maxProperties")
_OTHERS = ("properties", "patternProperties", "prefixItems")
"""Keywords for members and items to which `additionalProperties` and `items` do not apply."""
_FINAL = ("maxItems", "maxProperties", "propertyNames", "additionalProperties", "type")
"""Keywords that an open value violates for ever."""
_LOOKS_AROUND = re.compile(r"\(\?<?!")
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
    texts: list[list[str]] = field(default_factory=list)
    """Patterns that are checked, if it is a string: it matches one of each list."""
    names: list[list[str]] = field(default_factory=list)
    """The same for its keys, if it is an object."""
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
        found = Applied(nodes, bool(marked), is_bounded)
        for node, certain in nodes.items():
            if certain and node in self._marked:
                self._add_patterns(found, node.schema, self._marked[node])
        return found

    def _add_patterns(self, found: Applied, schema: dict[str, Any], checked: set[str]) -> None:
        if "pattern" in checked and _is_safe(schema["pattern"]):
            found.texts.append([schema["pattern"]])
        names = schema.get("propertyNames")
        if "propertyNames" in checked and isinstance(names, dict) and _is_safe(names.get("pattern", "(?!$)")):
            found.names.append([names["pattern"]])
        if "additionalProperties" in checked and schema["additionalProperties"] is False:
            patterns = [f"^{re.escape(name)}$" for name in schema.get("properties", ())]
            patterns += schema.get("patternProperties", ())
            if all(map(_is_safe, patterns)):
                found.names.append(patterns)

    def violation(
        self, text: str, path: Path | None, *, unfinished: bool = False, counts: bool = False
    ) -> ConstraintNotMet | None:
        """Return what is finally wrong with a beginning that was closed.

        Args:
            text: the closed beginning.
            path: the keys and indices of the innermost open value. None: no value is open.
            unfinished: that value is a placeholder. If not, it is an object or an array with complete members.
            counts: the placeholder stands for any member or item: only their number counts.
        """
        try:
            for error in self.validator.errors(json.loads(text)):
                if counts and error.kind.name not in _COUNTS:
                    continue
                if _is_final(error, path, unfinished):
                    return described(error)
        except (ValueError, RecursionError):
            pass  # the validation at the end says so
        return None


def can_go_on(text: str, patterns: Sequence[str]) -> bool:
    """Return whether a text with this beginning may have a match of one of `patterns`."""
    import regex  # only workers with such a schema need it

    try:
        compiled = (regex.compile(pattern, regex.ASCII) for pattern in patterns)
        return any(pattern.search(text, partial=True, timeout=_TIMEOUT) for pattern in compiled)
    except (regex.error, TimeoutError):
        return True


def _is_safe(pattern: str) -> bool:
    """Return whether partial matches can be trusted: not where a negative lookaround sees the end of the text."""
    return not (_LOOKS_AROUND.search(pattern) and ("$" in pattern or r"\b" in pattern.lower()))


def _is_final(error: ValidationError, path: Path | None, unfinished: bool) -> bool:
    """Return whether no continuation mends an error of the closed beginning."""
    place = error.instance_path
    if path is None:
        return True
    if _depends(error, path):
        return False
    if place != path[: len(place)]:
        return True  # the value is complete
    if place == path and unfinished:
        return False
    keyword = keyword_of(error)
    if keyword == "uniqueItems":
        return place == path
    if keyword in ("anyOf", "oneOf"):
        branches: list[list[ValidationError]] = error.kind.as_dict()["context"]
        return all(any(_is_final(inner, path, unfinished) for inner in branch) for branch in branches)
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
