"""The normal form has the meaning of the schema: for real schemas with instances, and for small ones."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.limits import DEFAULT_LIMITS
from guided.schema.document import parse
from guided.schema.form import NormalForm
from guided.schema.normal_form import normalise

DATA = Path(__file__).parents[4] / "shared" / "data" / "maskbench-dev.jsonl.gz"


def as_document(form: NormalForm) -> Any:
    """Return the normal form as one schema document."""
    if isinstance(form.root, bool) or not form.definitions:
        return form.root
    return {**form.root, "$defs": form.definitions}


@pytest.mark.parametrize(
    ("schema", "normal"),
    [
        (True, True),
        ({}, True),
        ({"title": "x", "x-own": 1, "default": 2}, True),
        ({"type": "integer", "minLength": 3, "minimum": 1}, {"type": "integer", "minimum": 1}),
        ({"minimum": 1, "exclusiveMinimum": 1}, {"exclusiveMinimum": 1}),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"const": 1, "type": "string"}, False),
        ({"enum": [1, 2, 3], "not": {"const": 2}}, {"enum": [1, 3]}),
        ({"allOf": [{"type": "string"}, {"minLength": 2}, {"minLength": 3}]}, {"type": "string", "minLength": 3}),
        ({"allOf": [{"minimum": 10}, {"maximum": 5}, {"type": "integer"}]}, False),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "null"]}]}, {"type": "integer"}),
        ({"anyOf": [False, {"type": "null"}]}, {"type": "null"}),
        ({"anyOf": [{"type": "string"}, True]}, True),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (
            {"oneOf": [{"type": "number"}, {"type": ["number", "null"], "minimum": 1}]},
            {"anyOf": [{"type": "number", "exclusiveMaximum": 1}, {"type": "null"}]},
        ),
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["a"], "properties": {"a": True}}),
        (
            {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
            {
                "anyOf": [
                    {"type": "object", "properties": {"a": True}, "required": ["a"]},
                    {"type": "object", "properties": {"a": True}, "maxProperties": 0},
                ]
            },
        ),
        ({"allOf": [{"not": {}}, {"not": {"type": "null"}}]}, False),
        ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": "string"}),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
            {"type": "object", "properties": {"a": False, "b": True}},
        ),
        (
            {
                "properties": {"k": {"enum": [1, 2]}},
                "type": "object",
                "required": ["k"],
                "not": {"properties": {"k": {"const": 1}}},
            },
            {"properties": {"k": {"enum": [2]}}, "type": "object", "required": ["k"]},
        ),
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
                "required": ["k"],
                "if": {"properties": {"k": {"const": "x"}}},
                "then": {"required": ["v"]},
                "else": {"properties": {"v": False}},
            },
            {
                "anyOf": [
                    {"type": "object", "properties": {"k": {"enum": ["x"]}, "v": True}, "required": ["k", "v"]},
                    {"type": "object", "properties": {"k": {"enum": ["y"]}, "v": False}, "required": ["k"]},
                ]
            },
        ),
        (
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {"a": {}, "b": {}},
                "dependentRequired": {"a": ["b"]},
            },
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"a": True, "b": True},
                        "additionalProperties": False,
                        "required": ["a", "b"],
                    },
                    {"type": "object", "properties": {"a": False, "b": True}, "additionalProperties": False},
                ]
            },
        ),
        (
            {"oneOf": [{"type": "object", "properties": {n: {}}, "additionalProperties": False} for n in "ab"]},
            {
                "anyOf": [
                    {"type": "object", "properties": {n: True}, "additionalProperties": False, "required": [n]}
                    for n in "ab"
                ]
            },
        ),
        ({"type": "string", "format": "mongoId"}, {"type": "string"}),
        (
            {"type": "array", "not": {"contains": {"type": ["null", "boolean", "object"]}}},
            {"type": "array", "items": {"type": ["array", "number", "string"]}},
        ),
    ],
)
def test_normal_forms(schema: Any, normal: Any) -> None:
    assert as_document(normalise(schema)) == normal


def test_keywords_of_later_drafts_allow_nothing_that_the_draft_forbids() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert normalise({**draft, "contains": {"const": 1}, "minContains": 0}).root == {"contains": {"const": 1}}
    assert normalise({**draft, "prefixItems": [{}], "items": {"type": "null"}}).root == {"items": {"type": "null"}}


def test_older_dialects_come_out_as_2020_12() -> None:
    draft4 = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "object",
        "properties": {
            "n": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
            "t": {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
            "r": {"$ref": "#/definitions/s", "minLength": 99},
        },
        "dependencies": {"n": ["t"], "t": {"required": ["n"]}},
        "definitions": {"s": {"type": "string"}},
    }
    properties = {
        "n": {"type": "number", "exclusiveMinimum": 0},
        "t": {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        "r": {"$ref": "#/$defs/d0"},  # neighbours of $ref said nothing then
    }
    assert as_document(normalise(draft4)) == {
        "anyOf": [
            {"type": "object", "properties": properties, "required": ["n", "t"]},
            {"type": "object", "properties": {**properties, "n": False, "t": False}},
        ],
        "$defs": {"d0": {"type": "string"}},
    }


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema#"]
)
def test_patterns_beside_listed_values_are_those_of_ecma_262_in_every_dialect(dialect: str) -> None:
    schema = {"$schema": dialect, "enum": ["3", "٣"], "pattern": "^\\d$"}
    assert as_document(normalise(schema)) == {"enum": ["3"]}


def test_draft_3_comes_out_as_2020_12() -> None:
    draft3 = {
        "$schema": "http://json-schema.org/draft-03/schema#",
        "properties": {
            "n": {"type": "integer", "divisibleBy": 7, "required": True},
            "e": {"extends": {"type": "string"}, "minLength": 1},
            "t": {"type": ["null", {"type": "boolean"}]},
            "d": {"disallow": ["string", {"type": "null"}], "required": False},
        },
        "required": True,
    }
    assert as_document(normalise(draft3)) == {
        "properties": {
            "n": {"type": "integer", "multipleOf": 7},
            "e": {"type": "string", "minLength": 1},
            "t": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
            "d": {"type": ["boolean", "object", "array", "number"]},
        },
        "required": ["n"],
    }


def test_a_dynamic_reference_leads_to_the_outermost_anchor() -> None:
    generic = {"$id": "http://x/list", "items": {"$dynamicRef": "#T"}, "$defs": {"any": {"$dynamicAnchor": "T"}}}
    of_nulls = {"$id": "http://x/nulls", "$ref": "list", "$defs": {"item": {"$dynamicAnchor": "T", "type": "null"}}}
    schema = {
        "$id": "http://x/",
        "type": "object",
        "properties": {"any": {"$ref": "list"}, "nulls": {"$ref": "nulls"}},
        "$defs": {"list": generic, "nulls": of_nulls},
    }
    validator = Draft202012Validator(as_document(normalise(schema)))
    assert validator.is_valid({"any": [1], "nulls": [None]})
    assert not validator.is_valid({"nulls": [1]})


def test_a_recursive_reference_with_several_targets_is_refused() -> None:
    inner = {"$id": "http://x/list", "items": {"$recursiveRef": "#"}, "$recursiveAnchor": True}
    schema = {"$schema": "https://json-schema.org/draft/2019-09/schema", "$id": "http://x/", "$ref": "list"}
    schema |= {"$defs": {"list": inner}}
    normalise(schema)
    with pytest.raises(UnsupportedConstraint, match="several targets") as caught:
        normalise({**schema, "$defs": {"list": inner, "null": {"$id": "http://x/null", "$recursiveAnchor": True}}})
    assert caught.value.pointer == "/$defs/list/items/$recursiveRef"


def test_a_closed_one_of_keeps_its_alternatives_apart() -> None:
    schema = {
        "properties": {"a": {"type": "null"}},
        "oneOf": [{"properties": {name: {}}, "required": [name]} for name in "bc"],
        "unevaluatedProperties": False,
    }
    validator = Draft202012Validator(as_document(normalise(schema)))
    assert all(map(validator.is_valid, ({"b": 1}, {"c": 1, "a": None})))
    assert not any(map(validator.is_valid, ({}, {"b": 1, "c": 1}, {"b": 1, "x": 1}, {"b": 1, "a": 1})))


def test_a_part_in_another_dialect_is_refused_where_it_differs() -> None:
    part = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": {"$ref": "#/$defs/a"}}
    schema = {"properties": {"p": part}, "$defs": {"a": {}}}
    normalise(schema)
    part["items"] = {"$ref": "#/$defs/a", "type": "null"}
    with pytest.raises(UnsupportedConstraint, match=r"\$schema") as caught:
        normalise(schema)
    assert caught.value.pointer == "/properties/p/$schema"


def test_unevaluated_properties_close_what_a_reference_names() -> None:
    target = {"type": "object", "properties": {"a": {"type": "null"}}}
    schema = {"$ref": "#/$defs/a", "unevaluatedProperties": False, "$defs": {"a": target}}
    assert normalise(schema).root == {**target, "additionalProperties": False}
    assert normalise({"anyOf": [True, {"type": "null"}], "unevaluatedItems": False}).root == {"items": False}


def test_nothing_is_left_of_an_object_that_may_not_have_its_required_property() -> None:
    needs_b = {"type": "object", "required": ["b"]}
    assert normalise({"allOf": [needs_b], "unevaluatedProperties": False}).root is False
    has_b = {**needs_b, "properties": {"b": {}}}
    either = normalise({"anyOf": [{**needs_b, "properties": {"c": {}}}, has_b], "unevaluatedProperties": False})
    closed = {**needs_b, "properties": {"b": True}, "additionalProperties": False}
    assert either.alternatives(either.root) == [closed]


def test_an_alternative_with_a_property_stays_beside_a_more_general_one_if_the_others_are_closed() -> None:
    named = [{"properties": dict.fromkeys(names, True)} for names in ("a", "ab")]
    validator = Draft202012Validator(as_document(normalise({"anyOf": named, "unevaluatedProperties": False})))
    assert all(map(validator.is_valid, ({}, {"a": 1}, {"a": 1, "b": 1})))
    assert not validator.is_valid({"c": 1})


def test_listed_values_are_checked_against_what_stands_next_to_them() -> None:
    assert normalise({"anyOf": [{"enum": [[1], []]}], "unevaluatedItems": False}).root == {"enum": [[]]}
    string = {"$defs": {"a": {"type": "string"}}, "$id": "http://x/string", "enum": ["a", 1], "$ref": "#/$defs/a"}
    schema = {"$id": "http://x/", "items": string, "$defs": {"a": {"type": "integer"}}}
    assert normalise(schema).root == {"items": {"enum": ["a"]}}


def test_references_are_merged_with_what_stands_next_to_them_unless_recursive() -> None:
    schema = {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string", "minLength": 1}}}
    assert normalise(schema).root == {"type": "string", "minLength": 2}
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    schema = {"$defs": {"tree": tree}, "properties": {"a": {"$ref": "#/$defs/tree", "required": ["next"]}}}
    form = normalise(schema)
    assert Draft202012Validator(as_document(form)).is_valid({"a": {"next": {"next": {}}}})
    assert not Draft202012Validator(as_document(form)).is_valid({"a": {}})


def test_a_property_may_be_named_like_a_keyword() -> None:
    part = {"properties": {"const": {"$ref": "#/$defs/n"}, "enum": {"$ref": "#/$defs/n"}}}
    values = [{"const": 1, "enum": 2}, {"const": "x"}, {"enum": "x"}]
    schema = {"allOf": [part, {"enum": values}], "$defs": {"n": {"type": "integer"}}}
    assert normalise(schema).root == {"enum": values[:1]}


def test_a_subschema_knows_where_it_came_from() -> None:
    schema = {"properties": {"a/b": {"type": "array", "items": {"type": "string", "pattern": "x"}}}}
    form = normalise(schema)
    assert isinstance(form.root, dict)
    assert form.pointer(form.root["properties"]["a/b"]["items"]) == "/properties/a~1b/items"


def test_parts_without_a_finite_instance_are_excluded() -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/endless"}}, "required": ["n"]}
    tree = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/endless"}, {"$ref": "#/$defs/tree"}]}}}
    defs = {"endless": endless, "tree": tree}
    form = normalise({"$defs": defs, "properties": {"x": {"$ref": "#/$defs/endless"}, "y": {"$ref": "#/$defs/tree"}}})
    assert isinstance(form.root, dict)
    assert form.root["properties"]["x"] is False
    tree_form = form.target(form.root["properties"]["y"])
    assert isinstance(tree_form, dict)
    assert tree_form["properties"]["n"] == form.root["properties"]["y"]
    for schema in (
        {"$ref": "#/$defs/endless", "$defs": defs},
        {"properties": {"n": {"$ref": "#"}}, "required": ["n"], "type": "object"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, {"$ref": "#/$defs/endless"}],
            "$defs": defs,
        },
    ):
        with pytest.raises(InvalidConstraint, match="no finite value"):
            normalise(schema)


def test_rewriting_can_be_left_out() -> None:
    schema = {"type": "object", "not": {"required": ["a"]}, "if": {"required": ["b"]}, "then": {"required": ["c"]}}
    form = normalise(schema, rewrite=False)
    assert isinstance(form.root, dict)
    assert {"not", "if"} <= form.root.keys()
    assert isinstance(rewritten := normalise(schema).root, dict)
    assert rewritten.keys() == {"anyOf"}


def test_malformed_patterns_are_refused_where_they_matter() -> None:
    with pytest.raises(InvalidConstraint, match="malformed"):
        normalise({"enum": ["a", "b"], "pattern": "("})


@pytest.mark.skipif(not DATA.exists(), reason="shared/data is not here")
def test_real_schemas_mean_the_same_in_normal_form() -> None:
    agreed = {True: 0, False: 0}
    with gzip.open(DATA) as lines:
        for line in itertools.islice(lines, 0, None, 3):
            entry = json.loads(line)
            try:
                document = parse(entry["schema"], DEFAULT_LIMITS, "json_schema")
            except InvalidConstraint:
                continue
            original = validator_for(document, default=Draft202012Validator)(document)
            normal = Draft202012Validator(as_document(normalise(document)))
            for test in entry["tests"]:
                verdict = original.is_valid(test["data"])
                assert normal.is_valid(test["data"]) == verdict, entry["id"]
                agreed[verdict] += 1
    assert min(agreed.values()) > 300


_VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2, 3.5, "", "a", "ab", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)
_TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "integer", "string"])
_LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": _TYPES | st.lists(_TYPES, min_size=1, max_size=3, unique=True),
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(1, 3),
        "minimum": st.integers(0, 2),
        "exclusiveMaximum": st.integers(2, 4),
        "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        "minItems": st.integers(0, 1),
        "maxItems": st.integers(1, 2),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 2),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "enum": st.lists(_VALUES, min_size=1, max_size=3),
        "pattern": st.sampled_from(["a", "^a", "b$"]),
        "uniqueItems": st.booleans(),
        "additionalProperties": st.booleans(),
        "unknown": st.just(1),
    },
)
_COMPOUND = st.recursive(
    _LEAVES | st.booleans(),
    lambda inner: st.tuples(
        _LEAVES,
        st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
                "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
                "additionalProperties": inner,
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
                "anyOf": st.lists(inner, min_size=1, max_size=2),
                "oneOf": st.lists(inner, min_size=1, max_size=2),
                "not": inner,
                "dependentRequired": st.just({"a": ["b"]}),
                "dependentSchemas": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
                "if": inner,
                "then": inner,
                "else": inner,
                "contains": inner,
                "propertyNames": inner,
                "$ref": st.just("#/$defs/s"),
            },
        ),
    ).map(lambda pair: {**pair[0], **pair[1]}),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(_COMPOUND, _LEAVES, st.lists(_VALUES, min_size=1, max_size=8))
def test_any_schema_means_the_same_in_normal_form(schema: Any, shared: Any, values: list[Any]) -> None:
    if isinstance(schema, bool):
        return
    schema = {**schema, "$defs": {"s": shared}}
    normal = Draft202012Validator(as_document(normalise(schema)))
    original = Draft202012Validator(schema)
    for value in values:
        assert normal.is_valid(value) == original.is_valid(value), value


@pytest.mark.parametrize("contradiction", [{"type": "string", "enum": [1]}, {"not": {}}])
def test_a_definition_that_no_value_satisfies_is_false_and_not_endless(contradiction: dict[str, Any]) -> None:
    definitions = {"$defs": {"s": contradiction}}
    assert normalise({"$ref": "#/$defs/s", **definitions}).root is False
    required = {"type": "object", "properties": {"a": {"$ref": "#/$defs/s"}}, "required": ["a"], **definitions}
    assert normalise(required).root is False


def test_many_alternatives_stay() -> None:
    nested = [{"anyOf": [{"type": "object", "required": [f"{i}-{j}"]} for j in range(30)]} for i in range(5)]
    form = normalise({"anyOf": nested})
    assert isinstance(form.root, dict)
    assert len(form.root["anyOf"]) == 150
    both = normalise(
        {"allOf": [{"anyOf": nested}, {"anyOf": [{"type": "object", "maxProperties": n} for n in (3, 5)]}]}
    )
    assert isinstance(both.root, dict)
