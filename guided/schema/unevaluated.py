"""`unevaluatedProperties` and `unevaluatedItems`, if their effect depends on the schema alone and not on the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guided.errors import UnsupportedConstraint
from guided.schema.combination import Combinations, with_valid_values
from guided.schema.definitions import Definitions, Inexact
from guided.schema.form import target_name
from guided.schema.graph import Node, SchemaGraph
from guided.schema.keywords import Schema, cleaned, listed

_DESCRIBES = {
    "unevaluatedProperties": {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"},
    "unevaluatedItems": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"},
}
_STANDING_FOR = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_ALWAYS = ("$ref", "$dynamicRef", "$recursiveRef", "allOf")
_BRANCHES = ("if", "then", "else")
_EITHER = (*_ALWAYS, "anyOf", "oneOf", "dependentSchemas", "dependencies")
UNEVALUATED = _DESCRIBES.keys()


def unevaluated(node: Node) -> dict[str, Any]:
    """Return the two keywords of a subschema, without those for which another keyword describes everything.

    Raises:
        UnsupportedConstraint: what is evaluated depends on the value, other than by `anyOf`, `oneOf` and
            `dependentSchemas`, and its own `if`.
    """
    found: dict[str, Any] = {}
    for keyword in _DESCRIBES.keys() & node.schema.keys():
        always = _applied([node], _ALWAYS)
        if any(_describes_all(one, keyword, one is node) for one in always):
            continue
        branches = [child for name, child in node.same if name in _BRANCHES]
        either = _applied([node, *branches], _EITHER)
        depending = [child for one in either for name, child in one.same if _depends(name, one is node)]
        if (
            any(_DESCRIBES[keyword] & one.schema.keys() for one in _applied(depending, None))
            or any(_describes_all(one, keyword, one is node) for one in either)
            or (keyword == "unevaluatedItems" and any("contains" in one.schema for one in either))
        ):
            raise depends_on_value(node, keyword)
        found[keyword] = node.schema[keyword]
    return found


def depends_on_value(node: Node, keyword: str) -> UnsupportedConstraint:
    """Return the error for a subschema in which the value decides what is evaluated."""
    return UnsupportedConstraint(
        f"{keyword!r} can't be enforced where what it applies to depends on the value ('if', 'contains', or an "
        "alternative for all properties or items)",
        param="json_schema",
        pointer=f"{node.pointer}/{keyword}",
    )


def evaluating(graph: SchemaGraph) -> set[int]:
    """Return the `id`s of nodes that one of the two keywords depends on."""
    return {id(one) for one in _applied([node for node in graph.nodes() if node.schema.keys() & UNEVALUATED], None)}


def _depends(keyword: str, is_own: bool) -> bool:
    """Whether the value decides what `keyword` evaluates. (Subschemas under `not` never evaluate anything.)"""
    return keyword not in (*_EITHER, "not", *(_BRANCHES if is_own else ()))


def _applied(start: list[Node], keywords: tuple[str, ...] | None) -> list[Node]:
    """Return `start` and the subschemas that these apply to the same value with `keywords` (None: with any)."""
    found: dict[int, Node] = {}
    todo = list(start)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += [child for name, child in node.same if keywords is None or name in keywords]
    return list(found.values())


def _describes_all(node: Node, keyword: str, is_own: bool) -> bool:
    """Whether a subschema describes every property or item of its value."""
    if keyword in node.schema and not is_own:
        return True
    if keyword == "unevaluatedProperties":
        return "additionalProperties" in node.schema
    items = node.schema.get("items", [])
    return not isinstance(items, list) or "additionalItems" in node.schema


def closed(schema: Schema, rest: dict[str, Schema], definitions: Definitions, validator: Any) -> Schema:
    """Return `schema` in normal form with the two keywords as `additionalProperties` and `items`.

    Each alternative is closed separately: a value that needs two of them together is excluded (a subset).

    Args:
        rest: the two keywords, in normal form.
        validator: checks listed values against the subschema that has the keywords.
    """
    if schema is False or not rest:
        return schema
    if schema is True:
        schema = {}
    if "anyOf" in schema:
        parts = [closed(part, rest, definitions, validator) for part in schema["anyOf"]]
        possible = [part for part in parts if part is not False]
        return {"anyOf": possible} if possible else False
    if "$ref" in schema:
        try:
            return closed(definitions.get(target_name(schema)), rest, definitions, validator)
        except Inexact:
            return {"allOf": [schema, {"unevaluatedProperties": False}]}
    if (values := listed(schema)) is not None:
        return with_valid_values(schema, values, validator)
    standing = {_STANDING_FOR[keyword]: value for keyword, value in rest.items() if value is not True}
    return cleaned({**schema, **{keyword: value for keyword, value in standing.items() if keyword not in schema}})


def closed_apart(
    merged: Schema, parts: list[Schema], combinations: Combinations, close: Callable[[Schema], Schema]
) -> Schema | None:
    """Close each of the alternatives `parts` of a `oneOf` beside `merged`, for objects. None if they overlap then.

    Args:
        close: applies the two keywords to an alternative: see `closed`.
    """
    found: list[Schema] = []
    for index, part in enumerate(parts):
        try:
            one = combinations.merge({"type": "object"}, close(combinations.merge(merged, part)))
        except Inexact:
            return None
        if not all(combinations.disjoint(one, other) for other in (*parts[:index], *parts[index + 1 :])):
            return None
        found.append(one)
    return combinations.any_of(found) if parts else None
