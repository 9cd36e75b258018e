"""The dynamic scope: the subschema that a `$dynamicRef` refers to depends on the path by which it is reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from guided.errors import UnsupportedConstraint
from guided.schema.graph import Node, SchemaGraph

Scope = dict[str, Node]
"""Dynamic anchor -> the outermost subschema with it on the path to the present subschema."""


class DynamicScope:
    """The dynamic scope while a document is read. `current` is that of the present subschema."""

    def __init__(self, graph: SchemaGraph) -> None:
        self.current: Scope = {}
        self._recursive_anchors = sum(bool(node.schema.get("$recursiveAnchor")) for node in graph.nodes())
        self._anchors: dict[int, Scope] = {}
        """By `id` of a schema resource: the subschemas with a `$dynamicAnchor` in it."""
        for node in graph.nodes():
            if isinstance(anchor := node.schema.get("$dynamicAnchor"), str):
                self._anchors.setdefault(_resource(node), {})[anchor] = node

    @contextmanager
    def within(self, node: Node, outer: Scope | None = None) -> Iterator[None]:
        """Enter a subschema, from the present scope or from `outer`."""
        before = self.current
        self.current = before if outer is None else outer
        if self._anchors:
            self.current = {**self._anchors.get(_resource(node), {}), **self.current}
        try:
            yield
        finally:
            self.current = before

    def target(self, keyword: str, node: Node, target: Node) -> Node:
        """Return the target of a reference in the present scope.

        Args:
            node: the subschema with the reference.
            target: the target without a dynamic scope.
        """
        if keyword == "$dynamicRef":
            anchor = node.schema[keyword].rpartition("#")[2]
            if target.schema.get("$dynamicAnchor") == anchor:
                return self.current.get(anchor, target)
        if keyword == "$recursiveRef" and target.schema.get("$recursiveAnchor") and self._recursive_anchors > 1:
            raise UnsupportedConstraint(
                f"{keyword!r} with several targets ('$recursiveAnchor' occurs more than once) can't be enforced: use"
                " '$ref'",
                param="json_schema",
                pointer=f"{node.pointer}/{keyword}",
            )
        return target


def _resource(node: Node) -> int:
    """Return the `id` of the schema resource that a subschema belongs to: the nearest one with an identifier."""
    while node.parent is not None and "$id" not in node.schema:
        node = node.parent
    return id(node.schema)
