"""Where subschemas in canonical form come from in the schema as sent: for pointers and
the order of properties."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from guided.json_text import JsonObject
from guided.schema.graph import REFERENCES, Node, SchemaGraph
from guided.schema.keywords import OPENING, listed

_ALWAYS = (*REFERENCES, "allOf")
"""Keywords of which every subschema applies to the same value. The others are
alternatives or conditions."""
_UNIONS = ("anyOf", "oneOf")
_SOURCES = {
    "additionalProperties": ("unevaluatedProperties",),
    "items": ("additionalItems", "unevaluatedItems"),
    "prefixItems": ("items",),
    "maxItems": ("additionalItems", "items"),
    "propertyNames": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("propertyNames",),
    "const": ("enum",),
    "enum": ("const",),
    "required": ("dependentRequired", "dependencies"),
    "exclusiveMinimum": ("minimum",),
    "exclusiveMaximum": ("maximum",),
}
"""Keyword of the canonical form -> other keywords that it may come from."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The subschemas as sent that describe the same value as one in canonical form."""

    graph: SchemaGraph
    nodes: list[Node]
    """The subschemas, in the order in which they name properties: what `$ref`, `allOf`
    or `oneOf` before `properties` applies comes first."""
    always: list[Node]
    """The `nodes` that are no alternative and no condition."""
    naming: list[Node]
    """The `nodes` that name the properties of the object: without conditions that
    probably do not hold."""

    @classmethod
    def of(cls, graph: SchemaGraph, starts: list[Node]) -> Origin:
        """Return the origin of what `starts` and the subschemas describe that they
        apply to the same value."""
        nodes = _closure(starts, always=False)
        return cls(graph, nodes, _closure(starts, always=True), nodes)

    def pointers(self, keyword: str) -> Iterator[str]:
        """Yield where `keyword` may come from: the JSON pointers of such keywords, or
        of the subschema."""
        names = (keyword, *_SOURCES.get(keyword, ()))
        places = [
            node.pointer(name)
            for node in self.nodes
            for name in names
            if name in node.schema
        ]
        yield from places or [node.pointer() for node in self.nodes[:1]] or [""]

    def names(self, known: Iterable[str] = ()) -> list[str]:
        """Return the names of properties, in their order. `known`: further names, which
        patterns may spell."""
        patterns = " ".join(
            pattern for node in self.nodes for _, pattern in node.patterns()
        )
        spelled = sorted(filter(patterns.__contains__, known), key=patterns.find)
        declared = [
            name for node in self.nodes for name in _object(node.schema, "properties")
        ]
        others = [name for node in self.always for name in _listed_names(node.schema)]
        return [*dict.fromkeys((*declared, *spelled, *others))]

    def declared(self) -> set[str]:
        """Return the names of the properties that no alternative and no condition
        names."""
        names: set[str] = set()
        for node in self.always:
            names.update(_object(node.schema, "properties"), _listed_names(node.schema))
        return names

    def closed_names(self) -> list[str] | None:
        """Return the names of all properties of an object that names some and does not
        say whether it has others.

        None: it says so, or names none. What is under `not` and `if` does not count.
        """
        negated = [
            child
            for node in self.nodes
            for keyword, child in node.same
            if keyword in ("not", "if")
        ]
        left_out = set(map(id, _closure(negated, always=False)))
        described = [node for node in self.naming if id(node) not in left_out]
        if not any("properties" in node.schema for node in described):
            return None
        if not all(OPENING.isdisjoint(node.schema) for node in described):
            return None
        return Origin(self.graph, described, self.always, described).names()

    def values(self, values: list[Any]) -> list[Any]:
        """Return the values of an `enum` or `const` with the order of properties as
        sent."""
        sent = {
            _key(value): value
            for node in self.nodes
            for value in listed(node.schema) or ()
        }
        return [sent.get(_key(value), value) for value in values]

    def property(self, name: str) -> Origin:
        """Return the origin of a property's subschema."""
        named = self.part("properties", name=name)
        if named.nodes:
            return named
        return self.part(
            "patternProperties", "additionalProperties", "unevaluatedProperties"
        )

    def part(self, *keywords: str, name: str | int | None = None) -> Origin:
        """Return the origin of the subschemas under any of `keywords`; `name`: only of
        those of this name or index."""
        parts: list[Any] = []
        for value in (
            node.schema.get(keyword) for node in self.nodes for keyword in keywords
        ):
            match value, name:
                case list(), None:
                    parts += value
                case list(), int(index):
                    parts += value[index : index + 1]
                case dict(), str():
                    parts.append(value.get(name))
                case dict(), _:
                    parts += [value, *value.values()]
        return Origin.of(self.graph, list(filter(None, map(self.graph.find, parts))))

    def alternative(self, part: Any) -> Origin:
        """Return the origin of one of several alternatives, which is probably what
        names the same properties.

        Args:
            part: the alternative, in canonical form. These are sorted, and there is one
                for each combination of several `anyOf`, so its place says nothing.
        """
        wanted = _described(part)
        if not wanted or not self._groups:
            return self
        best = [
            max(group, key=lambda node: _likeness(node, wanted))
            for group in self._groups.values()
        ]
        kept = {*map(id, (*self.always, *_closure(best, always=False)))}
        nodes = [node for node in self.nodes if id(node) in kept]
        holding = [
            node
            for (_, keyword), node in zip(self._groups, best, strict=True)
            if keyword in _UNIONS
        ]
        for (_, keyword), group in self._groups.items():
            holding += [
                node
                for node in group
                if keyword not in _UNIONS and _said(node, always=False) <= wanted
            ]
        named = [*self.always, *_closure(holding, always=False)]
        return Origin(
            self.graph, nodes, [*self.always, *_closure(best, always=True)], named
        )

    @cached_property
    def _groups(self) -> dict[tuple[int, str], list[Node]]:
        """The alternatives of each `anyOf` and `oneOf`, and each condition."""
        groups: dict[tuple[int, str], list[Node]] = {}
        for node in self.nodes:
            for keyword, child in node.same:
                if keyword not in _ALWAYS:
                    groups.setdefault((id(node), keyword), []).append(child)
        return groups


def _closure(starts: list[Node], *, always: bool) -> list[Node]:
    """Return `starts` and what they apply to the same value, in order.

    Args:
        always: leave out alternatives and conditions.
    """
    earlier = set(_ALWAYS)
    if not always:
        earlier.update(_UNIONS)
    nodes: dict[int, Node] = {}
    entered: set[int] = set()
    todo = [(node, False) for node in reversed(starts)]
    while todo:
        node, is_done = todo.pop()
        if is_done:
            nodes[id(node)] = node
        elif id(node) not in entered:
            entered.add(id(node))
            places = {keyword: place for place, keyword in enumerate(node.schema)}
            named = places.get("properties", 0)
            children = sorted(node.same, key=lambda pair: places[pair[0]])
            before = [node]
            after: list[Node] = []
            for keyword, child in reversed(children):  # the last one is taken first
                if keyword in earlier and places[keyword] < named:
                    before.append(child)
                elif keyword in _ALWAYS:
                    after.append(child)
                elif not always:
                    todo.append((child, False))
            todo += [(child, child is node) for child in (*after, *before)]
    return list(nodes.values())


def _likeness(node: Node, wanted: set[Any]) -> int:
    """Return how much of what is wanted a subschema says, less what it says of every
    value and is not wanted."""
    return len(_said(node, always=False) & wanted) - len(
        _said(node, always=True) - wanted
    )


def _said(node: Node, *, always: bool) -> set[Any]:
    """Return what a subschema says of properties, with what it applies to the same
    value. `always`: see `_closure`."""
    return set[Any]().union(
        *(_described(inner.schema) for inner in _closure([node], always=always))
    )


def _described(schema: Any) -> set[Any]:
    """Return the names of an object's properties, their values if these are listed, and
    those that it requires."""
    if isinstance(schema, bool):
        return set()
    properties = _object(schema, "properties")
    values = {
        (name, repr(value))
        for name, part in properties.items()
        for value in listed(part) or ()
    }
    return {*properties, *values, *((name,) for name in schema.get("required", ()))}


def _listed_names(schema: JsonObject) -> Iterator[str]:
    """Yield the names of properties that `schema` lists elsewhere than in
    `properties`."""
    for keyword in ("dependentRequired", "dependencies"):
        for name, needed in _object(schema, keyword).items():
            yield name
            if isinstance(needed, list):
                yield from needed
    yield from schema.get("required", ())
    names = _object(schema, "propertyNames").get("enum", ())
    yield from (name for name in names if isinstance(name, str))


def _key(value: Any) -> str:
    """Return a text that is equal for values that differ only in the order of
    properties."""
    return json.dumps(value, sort_keys=True)


def _object(schema: JsonObject, keyword: str) -> JsonObject:
    value = schema.get(keyword)
    if isinstance(value, dict):
        return value
    return {}
