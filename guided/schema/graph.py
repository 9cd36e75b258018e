"""The subschemas of a JSON Schema as a graph. An edge: one applies another, to the same
value or a part.

Subschemas are found by position (JSON Schema core 2020-12, section 10, and the keywords
of older drafts), so a property named "items" or an enum value that contains "$ref" is
not mistaken for one. Nothing recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

import referencing.exceptions
import referencing.jsonschema
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from guided.errors import InvalidConstraint, bounded
from guided.json_text import JsonObject
from guided.schema.keywords import pointer, unescape
from guided.schema.validation import draft_of

_SAME = (
    "if",
    "then",
    "else",
    "not",
    "allOf",
    "anyOf",
    "oneOf",
    "dependentSchemas",
    "dependencies",
)
"""Keywords with subschemas for the same value."""
PARTS = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "items",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords with subschemas for parts of the value."""
_KEPT = ("$defs", "definitions")
NAMED = (*_KEPT, "dependentSchemas", "dependencies", "patternProperties", "properties")
"""Keywords with subschemas by name."""
Keys = tuple[str | int, ...]
"""Keys and indices that lead from a subschema to one in it."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LOOKUP_ERRORS = (
    referencing.exceptions.Unresolvable,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)


@dataclass(slots=True, eq=False)
class Node:
    """One subschema."""

    schema: Any
    """An object. While it is checked, any value in the place of a schema."""
    parent: Node | None
    """None: it is the document, or where a reference leads that is no known position of
    a schema."""
    path: Keys
    """Keys and indices below `parent`."""
    same: list[tuple[str, Node]] = field(default_factory=list)
    """(keyword, subschema) applied to the same value: `allOf`, `$ref`, `then`, ..."""
    parts: list[Node] = field(default_factory=list)
    """Applied to a part of the value: a property's, an item's."""

    def pointer(self, *path: str | int) -> str:
        """Return the JSON pointer of this subschema, or of a place in it. Not stored,
        because keys may be long."""
        whole = pointer(path)
        node: Node | None = self
        while node is not None:
            whole = pointer(node.path) + whole
            node = node.parent
        return whole

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Yield the patterns of this subschema, each after its JSON pointer."""
        pattern = self.schema.get("pattern")
        named = self.schema.get("patternProperties")
        if isinstance(pattern, str):
            yield self.pointer("pattern"), pattern
        if isinstance(named, dict):
            for name in named:
                yield self.pointer("patternProperties", name), name


class SchemaGraph:
    """All subschemas of a document.

    Args:
        check: called for each subschema before its contents are visited; raises if it
            is none.

    Raises:
        InvalidConstraint: a reference leads out of the document, or to nothing.
    """

    def __init__(
        self, document: JsonObject, check: Callable[[Node], None] = lambda _: None
    ) -> None:
        self._document = document
        self._check = check
        self._nodes: dict[int, Node] = {}
        """`id` of a subschema -> its node; parents before children."""
        self._unresolved: list[Node] = []
        """The nodes with references that are not edges yet."""
        self._resolvers: dict[int, Any] = {}
        """Resolver of the references in a node, by `id` of the node."""
        self._add(document, ())
        self._resolve()
        self.root = self._nodes[id(document)]

    def find(self, schema: Any) -> Node | None:
        """Return the node of a subschema of the document, which is found by identity;
        None if it has none."""
        return self._nodes.get(id(schema))

    def target(self, reference: str) -> Node | None:
        """Return the node that a reference leads to from the root; None if it is not
        known."""
        try:
            return self.find(self._resolvers[id(self.root)].lookup(reference).contents)
        except _LOOKUP_ERRORS:
            return None

    def nodes(self) -> Iterator[Node]:
        """Iterate over every object subschema, including unused `$defs`."""
        return iter(self._nodes.values())

    def refuse_endless_references(self) -> None:
        """Refuse a schema that applies itself to the same value: validation would never
        end.

        Raises:
            InvalidConstraint: with the pointer of a subschema in the loop.
        """
        if not self._resolvers:  # without references it is a tree
            return
        try:
            TopologicalSorter(
                {node: [child for _, child in node.same] for node in self.nodes()}
            ).prepare()
        except CycleError as error:
            message = (
                "the schema refers to itself for the same value, which never ends: put a keyword such as "
                "'properties' or 'items' in between"
            )
            raise InvalidConstraint(
                message, pointer=error.args[1][0].pointer()
            ) from None

    def _add(self, schema: Any, path: Keys) -> None:
        """Add a subschema and everything inside it."""
        todo: list[tuple[Any, Keys, Node | None, bool]] = [(schema, path, None, False)]
        while todo:
            schema, path, parent, same = todo.pop()
            node = self._nodes.get(id(schema))  # of booleans, there is none
            if node is None:
                node = Node(schema, parent, path)
                self._check(node)
                if not isinstance(schema, dict):
                    continue
                self._nodes[id(schema)] = node
                self._unresolved.append(node)
                todo += reversed(
                    [
                        (child, below, node, same)
                        for below, child, same in children(schema)
                    ]
                )
            if parent is not None and same:
                parent.same.append((str(path[0]), node))
            elif parent is not None and path[0] not in _KEPT:
                parent.parts.append(node)

    def _resolve(self) -> None:
        """Turn references into edges. A target outside the known schema positions is
        added."""
        if not any(
            isinstance(node.schema.get(keyword), str)
            for node in self._unresolved
            for keyword in REFERENCES
        ):
            return  # identifiers and anchors matter to references only
        specification = referencing.jsonschema.specification_with(
            draft_of(self._document)
        )
        root = specification.create_resource(self._document)
        try:
            start = REGISTRY.with_resource("", root).crawl().resolver_with_root(root)
        except _LOOKUP_ERRORS as error:
            message = f"the identifiers and anchors in the schema cannot be read: {bounded(error)}"
            raise InvalidConstraint(message, pointer="") from None
        for node in self._unresolved:  # `_link` adds to it
            above = self._resolvers.get(id(node.parent or node), start)
            resolver = above.in_subresource(specification.create_resource(node.schema))
            self._resolvers[id(node)] = resolver
            for keyword in REFERENCES:
                if isinstance(node.schema.get(keyword), str):
                    self._link(node, keyword, resolver)

    def _link(self, node: Node, keyword: str, resolver: Any) -> None:
        reference = node.schema[keyword]
        try:
            resolved = resolver.lookup(reference)
        except _LOOKUP_ERRORS as error:
            raise self._dangling(reference, node.pointer(keyword), error) from None
        target = resolved.contents
        if id(target) not in self._nodes:
            # JSON pointers such as "#/components/schemas/X" may lead anywhere in the
            # document.
            self._add(
                target,
                tuple(
                    map(unescape, unquote(reference.partition("#")[2]).split("/")[1:])
                ),
            )
            if isinstance(target, dict):
                self._resolvers[id(self._nodes[id(target)])] = resolved.resolver
        if isinstance(target, dict):
            node.same.append((keyword, self._nodes[id(target)]))

    def _dangling(
        self, reference: str, where: str, error: Exception
    ) -> InvalidConstraint:
        quoted = bounded(unquote(reference), 120)
        # A subclass of Unresolvable means that the document was found, but not the
        # place within it.
        if (
            reference.startswith("#")
            or type(error) is not referencing.exceptions.Unresolvable
        ):
            message = f"the reference {quoted!r} leads to nothing in this document"
        elif reference.startswith("/"):
            message = f"the reference {quoted!r} is no JSON pointer; did you mean '#{quoted}'?"
        else:
            message = (
                f"the reference {quoted!r} leads out of the document, and nothing is fetched: put the schema under "
                "'$defs' and refer to it as '#/$defs/...'"
            )
        return InvalidConstraint(message, pointer=where)


def closure(start: list[Node]) -> Iterator[Node]:
    """Iterate over `start` and all subschemas that they apply, each once, in document
    order where possible."""
    seen: set[int] = set()
    todo = list(reversed(start))
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            todo.extend(reversed([*(child for _, child in node.same), *node.parts]))


def children(schema: JsonObject) -> Iterator[tuple[Keys, Any, bool]]:
    """Yield (path below `schema`, subschema, applies to the same value) of each
    subschema, in order."""
    for keyword, value in schema.items():
        same = keyword in _SAME
        if not (same or keyword in PARTS or keyword in _KEPT):
            continue
        if keyword in NAMED and isinstance(value, dict):
            for name, child in value.items():
                if keyword != "dependencies" or isinstance(child, dict | bool):
                    yield (keyword, name), child, same
        elif keyword in NAMED:
            continue
        elif isinstance(value, list):
            yield from (
                ((keyword, index), child, same) for index, child in enumerate(value)
            )
        elif isinstance(value, dict):
            yield (keyword,), value, same
