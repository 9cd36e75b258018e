"""Where `unevaluatedProperties` and `unevaluatedItems` have an effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from guided.errors import UnsupportedConstraint
from guided.schema.graph import Node

_ALWAYS = ("$ref", "$dynamicRef", "$recursiveRef", "allOf")
_EITHER = (*_ALWAYS, "anyOf", "oneOf")
_CONDITIONAL = ("if", "then", "else", "dependentSchemas", "dependencies")
_DESCRIBES = {
    "unevaluatedProperties": {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"},
    "unevaluatedItems": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"},
}


def with_effective(node: Node) -> dict[str, Any]:
    """Return a subschema without the two keywords where others describe all properties or items anyway.

    Raises:
        UnsupportedConstraint: which properties or items are evaluated depends on the value in an unusual way.
    """
    kept = dict(node.schema)
    for keyword in _DESCRIBES.keys() & kept.keys():
        if any(_describes_all(one.schema, keyword, one is node) for one in _applied([node], _ALWAYS)):
            del kept[keyword]
            continue
        either = _applied([node], _EITHER)
        conditional = [child for one in either for name, child in one.same if name in _CONDITIONAL]
        if (
            any(_describes_all(one.schema, keyword, one is node) for one in either)
            or any(_DESCRIBES[keyword] & one.schema.keys() for one in _applied(conditional, (*_EITHER, *_CONDITIONAL)))
            or (keyword == "unevaluatedItems" and any("contains" in one.schema for one in either))
        ):
            raise UnsupportedConstraint(
                f"{keyword!r} can't be enforced where 'if', 'dependentSchemas', 'contains' or an alternative for all"
                " properties or items says what is evaluated",
                param="json_schema",
                pointer=f"{node.pointer}/{keyword}",
            )
    return kept


def _applied(start: list[Node], keywords: tuple[str, ...]) -> Iterable[Node]:
    """Return `start` and what it applies to the same value by `keywords`."""
    found: dict[int, Node] = {}
    todo = list(start)
    while todo:
        one = todo.pop()
        if id(one) not in found:
            found[id(one)] = one
            todo += [child for name, child in one.same if name in keywords]
    return found.values()


def _describes_all(schema: dict[str, Any], keyword: str, is_own: bool) -> bool:
    """Whether a subschema describes every property or item of its value."""
    if keyword in schema and not is_own:
        return True
    if keyword == "unevaluatedProperties":
        return "additionalProperties" in schema
    return not isinstance(schema.get("items", []), list) or "additionalItems" in schema
