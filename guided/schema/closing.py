"""Objects that name their properties have no others, unless the schema says so: requests bring such schemas.

Applications list `properties` and rarely write `additionalProperties: false`, and a model then goes on with keys that
the schema does not name. vLLM, SGLang, llama.cpp and OpenAI's strict mode close such objects, too.

An object is closed as a whole, as by `unevaluatedProperties: false` (JSON Schema core 2020-12, section 11.3): `allOf`,
`$ref`, `anyOf`, `if` and `dependentSchemas` contribute their properties. So each value that is left satisfies the
schema as sent. What is under `not`, `if` and `contains` stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from guided.schema.graph import Node, SchemaGraph, closure
from guided.schema.origin import listed_names, same_value
from guided.schema.validation import draft_of

_NEGATIVE = ("not", "if", "contains", "propertyNames")
"""Keywords with subschemas that may not be narrowed: their values are excluded, counted or conditions."""
_OPENING = ("additionalProperties", "unevaluatedProperties")
"""Keywords that say whether an object has other properties."""
_NAMING = ("properties", "patternProperties", *_OPENING)
"""Keywords that name properties."""
_MAX_JOINT = 3
"""Maximum number of alternatives that are closed together: each combination of them is an alternative then. Of more,
each is closed on its own."""
_CHANGED = (
    *("id", "$id", "additionalItems", "dependencies", "dependentRequired", "dependentSchemas", "prefixItems"),
    *("unevaluatedItems", "unevaluatedProperties", "minContains", "maxContains"),
)
"""Keywords that draft 7 lacks or reads otherwise than draft 2020-12."""
_BESIDE_REFERENCE = {"$ref", "$schema", "$defs", "definitions", "title", "description", "default", "examples"}


@dataclass(frozen=True)
class Closing:
    """An object to close."""

    node: Node
    """The subschema that gets the keyword."""
    group: list[Node]
    """The subschemas that describe the object: `node`, and what it applies to the same value."""

    @property
    def is_single(self) -> bool:
        """Whether `node` alone names properties: `additionalProperties` closes the object then."""
        return not any(_names(member) for member in self.group if member is not self.node)

    def declared(self) -> dict[str, bool]:
        """Return the names in `properties`."""
        return {name: True for member in self.group for name in member.schema.get("properties", ())}

    def undeclared(self) -> dict[str, bool]:
        """Return the names that are only in `required` and the like. They have any value."""
        declared = self.declared()
        listed = [name for member in self.group for name in listed_names(member.schema)]
        return {name: True for name in listed if name not in declared}


def closings(graph: SchemaGraph) -> list[Closing]:
    """Return the objects of a schema to close, in document order."""
    described = _described(graph)
    found: list[tuple[Node, Closing]] = []
    known: dict[int, Closing] = {}
    entered = set[int]()
    places = [graph.root]
    while places:
        place = places.pop()
        if id(place) in entered:
            continue
        entered.add(id(place))
        for core in _cores(place, described):
            if id(core) not in known:
                closing = known[id(core)] = Closing(core, _group(core))
                parts = [part for member in closing.group for part in member.parts]
                places.extend(part for part in parts if part.path[0] not in _NEGATIVE)
            found.append((place, known[id(core)]))
    # A subschema that is a part of several objects, or of a negation, may not change.
    shared = {id(node) for node in closure(list(_negated(graph)))}
    for _, closing in found:
        shared |= {id(member) for member in closing.group if member is not closing.node}
    chosen: dict[int, Closing] = {}
    for place, closing in found:
        if id(closing.node) in shared:
            closing = Closing(place, [place, *closing.group])
        if id(closing.node) not in shared and _is_open(closing.group):
            chosen.setdefault(id(closing.node), closing)
    return [chosen[id(node)] for node in graph.nodes() if id(node) in chosen]


def close(document: dict[str, Any], *, exactly: bool = True) -> dict[str, Any]:
    """Return a copy of a schema with closed objects.

    Args:
        exactly: False closes an object with alternatives by the names of all of them. It is an approximation for
            schemas of which the canonical form keeps `unevaluatedProperties`, and for drafts without this keyword.
    """
    copied = copy.deepcopy(document)
    graph = SchemaGraph(copied)
    draft = draft_of(copied)
    if "draft-0" in draft:
        exactly = exactly and "draft-07" in draft and not any(map(_has_changed, graph.nodes()))
        copied.pop("$schema" if exactly else "", None)
    for closing in closings(graph):
        schema = closing.node.schema
        if closing.is_single:
            schema["properties"] = schema.get("properties", {}) | closing.undeclared()
            schema["additionalProperties"] = False
            continue
        if exactly:
            schema["unevaluatedProperties"] = False
            names: dict[str, Any] = {"properties": closing.undeclared()}
        else:
            patterns = {name: True for member in closing.group for name in member.schema.get("patternProperties", ())}
            names = {"properties": closing.declared() | closing.undeclared(), "patternProperties": patterns}
            names["additionalProperties"] = False
        schema["allOf"] = [*schema.get("allOf", ()), names]
    return copied


def overlapping(document: dict[str, Any]) -> Iterator[tuple[Node, list[Any]]]:
    """Yield the subschemas with `oneOf` of which an alternative is narrowed, and the alternatives as sent.

    A value of two of these violates the schema as sent, also where only one of the narrowed ones has it.
    """
    graph = SchemaGraph(document)
    narrowed = {id(closing.node) for closing in closings(graph)}
    for node in graph.nodes():
        alternatives = [child for keyword, child in node.same if keyword == "oneOf"]
        if any(id(inside) in narrowed for inside in closure(alternatives)):
            yield node, node.schema["oneOf"]


def _described(graph: SchemaGraph) -> set[int]:
    """Return the `id` of the subschemas that name properties, and of those that apply them to the same value."""
    users: dict[int, list[Node]] = {}
    for node in graph.nodes():
        for keyword, child in node.same:
            if keyword not in _NEGATIVE:
                users.setdefault(id(child), []).append(node)
    todo = [node for node in graph.nodes() if _names(node)]
    found = set[int]()
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found.add(id(node))
            todo.extend(users.get(id(node), ()))
    return found


def _cores(place: Node, described: set[int]) -> Iterator[Node]:
    """Yield the subschemas that describe the object at `place`: itself, or what it is nothing but a name for."""
    todo = [place]
    entered = set[int]()
    while todo:
        node = todo.pop()
        if id(node) in entered:
            continue
        entered.add(id(node))
        keywords = {keyword for keyword, _ in node.same}
        objects = [child for _, child in node.same if id(child) in described]
        is_union = keywords <= {"anyOf", "oneOf"} and len(objects) > _MAX_JOINT
        if len(keywords) != 1 or _names(node) or "required" in node.schema or not (is_union or len(objects) == 1):
            yield node
        else:
            todo.extend(reversed(objects))


def _group(start: Node) -> list[Node]:
    """Return `start` and what it applies to the same value, without what is negated."""
    found: dict[int, Node] = {}
    todo = [start]
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo.extend(child for keyword, child in reversed(node.same) if keyword not in _NEGATIVE)
    return list(found.values())


def _is_open(group: list[Node]) -> bool:
    """Return whether an object names its properties, and does not say whether it has others."""
    is_named = any("properties" in member.schema for member in group)
    certain = same_value([group[0]], always=True)
    return is_named and not any(keyword in member.schema for member in certain for keyword in _OPENING)


def _negated(graph: SchemaGraph) -> Iterator[Node]:
    for node in graph.nodes():
        yield from (child for keyword, child in node.same if keyword in _NEGATIVE)
        yield from (part for part in node.parts if part.path[0] in _NEGATIVE)


def _has_changed(node: Node) -> bool:
    """Return whether draft 7 and draft 2020-12 may read a subschema differently."""
    schema = node.schema
    if "$ref" in schema and schema.keys() - _BESIDE_REFERENCE:
        return True
    return isinstance(schema.get("items"), list) or not schema.keys().isdisjoint(_CHANGED)


def _names(node: Node) -> bool:
    return not node.schema.keys().isdisjoint(_NAMING)
