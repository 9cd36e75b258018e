"""The canonical form has the meaning of the schema, and what a library gets of it is
the same or a superset."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from guided.backends.llguidance.schema import LLGuidanceLowering
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, InvalidConstraint
from guided.schema.canonical import CanonicalForm, canonical


def as_document(form: CanonicalForm) -> dict[str, Any]:
    return {"$defs": form.definitions, "allOf": [form.root]}


@pytest.mark.parametrize(
    ("schema", "root"),
    [
        (
            {"const": {"b": 1, "a": {"d": 2, "c": 3}}},
            {"const": {"b": 1, "a": {"d": 2, "c": 3}}},
        ),
        (
            {"allOf": [{"type": "string"}, {"minLength": 2}, {"minLength": 3}]},
            {"type": "string", "minLength": 3},
        ),
        (
            {
                "type": "object",
                "properties": {"b": {"type": "null"}, "a": {}},
                "required": ["c"],
            },
            {
                "type": "object",
                "properties": {"b": {"type": "null"}, "a": True, "c": True},
                "required": ["c"],
            },
        ),
        (
            {
                "type": "object",
                "$ref": "#/$defs/z",
                "properties": {"b": {"type": "null"}},
                "$defs": {"z": {"properties": {"c": {"type": "null"}}}},
            },
            {
                "type": "object",
                "properties": {"c": {"type": "null"}, "b": {"type": "null"}},
            },
        ),
    ],
    ids=str,
)
def test_forms(schema: Any, root: Any) -> None:
    found = canonical(schema).root
    assert found == root
    for name in {"properties", "const"} & (
        root.keys() if isinstance(root, dict) else set()
    ):
        assert isinstance(found, dict)
        assert json.dumps(found[name]) == json.dumps(root[name]), (
            "in the order of the schema"
        )


def test_recursive_references_with_neighbours_are_merged() -> None:
    tree = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/t"}},
    }
    form = canonical({"$ref": "#/$defs/t", "required": ["v"], "$defs": {"t": tree}})
    root = form.root
    while isinstance(root, dict) and "$ref" in root:
        root = form.target(root)
    assert isinstance(root, dict)
    assert (root["required"], list(root["properties"])) == (["v"], ["v", "n"])


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        (
            {"properties": {"a~/": {"type": "array", "uniqueItems": True}}},
            ["/properties/a~0~1/uniqueItems"],
        ),
        (
            {"allOf": [{"type": "array"}, {"uniqueItems": True}]},
            ["/allOf/1/uniqueItems"],
        ),
        (
            {"items": {"$ref": "#/$defs/u"}, "$defs": {"u": {"uniqueItems": True}}},
            ["/$defs/u/uniqueItems"],
        ),
        (
            {
                "anyOf": [
                    {"properties": {"t": {"const": n}, n: {"uniqueItems": True}}}
                    for n in "ba"
                ]
            },
            ["/anyOf/1/properties/a/uniqueItems", "/anyOf/0/properties/b/uniqueItems"],
        ),
    ],
    ids=str,
)
def test_what_is_left_out_has_its_pointer_in_the_schema_as_sent(
    schema: Any, places: list[str]
) -> None:
    lowering = LLGuidanceLowering(Constraint.json_schema(schema))
    lowering.document()
    assert sorted(lowering.checked) == sorted(places)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"minimum": 10}, {"maximum": 5}, {"type": "integer"}]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
        {"type": "object", "required": ["a"], "propertyNames": {"maxLength": 0}},
    ],
    ids=str,
)
def test_schemas_without_a_value_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidConstraint, match="no value"):
        canonical(schema)


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
    return st.fixed_dictionaries({}, optional=keywords).filter(
        lambda schema: len(schema) <= 4
    )


INNER = nested(LEAVES)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Two levels of keywords, and a definition."""
    root = draw(nested(st.one_of(LEAVES, INNER)))
    return {**root, "$defs": {"d": draw(INNER)}}


values = st.recursive(
    st.sampled_from([None, 1, 2, "a", "bc"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), inner)
    ),
    max_leaves=5,
)


@given(
    schemas(),
    st.lists(values, min_size=1, max_size=8),
    st.sets(st.sampled_from(["allOf", "not", "properties"])),
)
def test_the_meaning_stays_or_what_is_checked_widens_it(
    schema: dict[str, Any], instances: list[Any], leave_out: set[str]
) -> None:
    try:
        constraint = replace(Constraint.json_schema(schema), leave_out=tuple(leave_out))
    except InvalidConstraint:  # for example a `$ref` to itself
        return
    original = Draft202012Validator(schema)
    try:
        form = Draft202012Validator(as_document(canonical(schema)))
        lowering = LLGuidanceLowering(constraint)
        lowered = Draft202012Validator(lowering.document())
        verdicts = [
            (original.is_valid(one), form.is_valid(one), lowered.is_valid(one))
            for one in instances
        ]
    except InvalidConstraint:
        assert not any(map(original.is_valid, instances)), (
            "no value satisfies the schema"
        )
        return
    for before, after, written in verdicts:
        assert before == after or (before and "oneOf" in json.dumps(schema)), (
            "alternatives may be narrower"
        )
        assert written or not after, "a superset"
        assert written == after or lowering.checked, "what is not checked is enforced"


def test_alternatives_that_multiply_are_refused() -> None:
    product = {
        "type": "object",
        "allOf": [
            {"anyOf": [{"required": [f"{n}{m}"]} for m in "ab"]} for n in range(14)
        ],
    }
    with pytest.raises(ConstraintTooLarge, match="multiply"):
        canonical(product)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "string", "pattern": "[a"}, "/properties/a/pattern"),
        ({"patternProperties": {"(": {}}}, "/properties/a/patternProperties/("),
        ({"items": {"not": {"pattern": "a{3,2}"}}}, "/properties/a/items/not/pattern"),
        (
            {
                "type": "object",
                "properties": {"b": {"enum": [1], "type": "null"}},
                "required": ["b"],
            },
            "/b",
        ),
        (
            {
                "allOf": [
                    {"type": "string"},
                    {"type": "number"},
                    {"$ref": "#/$defs/text"},
                ]
            },
            "/properties/a",
        ),
    ],
)
def test_faults_are_located(part: Any, place: str) -> None:
    properties = {"a": part, "c": {"$ref": "#/$defs/text"}}
    document = {
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "$defs": {"text": {"type": "string"}},
    }
    with pytest.raises(InvalidConstraint) as caught:
        canonical(Constraint.json_schema(document).value)
    assert str(caught.value.pointer).endswith(place)


ORDERED = {
    "type": "object",
    "properties": {"z": {"type": "null"}, "a": {"type": "null"}},
    "additionalProperties": False,
}
TREE = {
    **ORDERED,
    "properties": {**ORDERED["properties"], "m": {"$ref": "#t"}, "b": {"type": "null"}},
}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"$ref": "#n", "$defs": {"n": {"$anchor": "n", **ORDERED}}}, ["z", "a"]),
        (
            {
                "items": {"$ref": "n"},
                "$defs": {"n": {"$id": "http://x.y/n", **ORDERED}},
                "$id": "http://x.y/",
            },
            ["z", "a"],
        ),
        (
            {
                "items": {"$ref": "#t"},
                "properties": {"q": {}},
                "$defs": {"t": {"$anchor": "t", **TREE}},
            },
            ["z", "a", "m", "b"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "items": {"$ref": "#t"},
                "definitions": {"t": {"id": "#t", **TREE}},
            },
            ["z", "a", "m", "b"],
        ),
        (
            {
                "$ref": "#/$defs/a~1b%20",
                "$defs": {
                    "a/b ": TREE,
                    "t": {"$anchor": "t", "$ref": "#/$defs/a~1b%20"},
                },
            },
            [*"zamb"],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^(z|id|a)$": {}},
                "additionalProperties": False,
            },
            ["z", "id", "a"],
        ),
        ({"oneOf": [{**ORDERED, "required": [name]} for name in "za"]}, ["z", "a"]),
    ],
    ids=str,
)
def test_properties_keep_the_order_of_the_source(schema: Any, names: list[str]) -> None:
    form = canonical(Constraint.json_schema(schema).value)
    orders = re.findall(
        r'"properties": (\{(?:[^{}]|\{[^{}]*\})*\})',
        json.dumps([form.root, form.definitions]),
    )
    assert orders
    for order in orders:
        assert [name for name in names if name in json.loads(order)] == [
            name for name in json.loads(order) if name != "q"
        ]
