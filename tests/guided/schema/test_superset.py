"""Supersets of schemas: whatever satisfies the schema satisfies its superset."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided.schema.superset import Superset

LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"minimum": 2},
        {"const": 1},
        {"enum": ["a", 2]},
        {"maxLength": 1},
        {"$ref": "#/$defs/d"},
        True,
    ]
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps = st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    keywords = {
        "properties": maps,
        "patternProperties": maps,
        "dependentSchemas": maps,
        "additionalProperties": inner,
        "propertyNames": inner,
        "unevaluatedProperties": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "items": inner,
        "contains": inner,
        "maxContains": st.integers(0, 1),
        "uniqueItems": st.booleans(),
        "minProperties": st.integers(0, 2),
        "required": st.lists(st.sampled_from(["a", "b"]), unique=True),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
    }
    return st.fixed_dictionaries({}, optional=keywords).filter(lambda schema: len(schema) <= 4)


INNER = nested(LEAVES)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Two levels of keywords, and a definition."""
    root = draw(nested(st.one_of(LEAVES, INNER)))
    return {**root, "$defs": {"d": draw(INNER)}}


values = st.recursive(
    st.sampled_from([None, 1, 2, "a", "bc"]),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), inner)),
    max_leaves=5,
)


def places(schema: Any, place: str = "") -> list[str]:
    """The pointers in a document."""
    members = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    return [place, *(one for name, part in members for one in places(part, f"{place}/{name}"))]


@given(schemas(), st.data())
def test_a_superset_allows_what_the_schema_allows(schema: dict[str, Any], data: st.DataObject) -> None:
    superset = Superset(schema)
    for place in data.draw(st.lists(st.sampled_from(places(schema)), max_size=3)):
        superset.leave_out(place)
    relaxed = superset.schema()
    original, larger = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(relaxed)
    for value in data.draw(st.lists(values, min_size=1, max_size=8)):
        if original.is_valid(value):
            assert larger.is_valid(value), (schema, relaxed, value)
    assert bool(superset.checked) == (relaxed != schema)


def test_one_keyword_is_left_out_where_it_is_refused() -> None:
    schema = {"properties": {"a": {"uniqueItems": True}, "b": {"uniqueItems": True}}}
    superset = Superset(schema)
    assert superset.leave_out("/properties/a/uniqueItems")
    assert superset.schema() == {"properties": {"a": {}, "b": {"uniqueItems": True}}}
    assert superset.checked == ["/properties/a/uniqueItems"]


def test_without_a_place_the_usual_ones_go_step_by_step() -> None:
    schema = {"uniqueItems": True, "not": {"const": 1}, "patternProperties": {"^a": True}}
    superset = Superset(schema)
    found = []
    while superset.leave_out(None):
        found.append(superset.schema().keys())
    assert found == [{"not", "patternProperties"}, {"patternProperties"}, set()]


@pytest.mark.parametrize("place", ["/$defs", "/properties", "/$schema", "/properties/a", "/none"])
def test_what_others_depend_on_stays(place: str) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {}, "properties": {"a": True}}
    superset = Superset(schema)
    superset.leave_out(place)
    assert superset.schema() == schema
