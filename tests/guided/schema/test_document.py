"""Validation of JSON Schema documents, pointers of errors, and closing of objects."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest

from guided.errors import ConstraintTooLarge, InvalidConstraint
from guided.limits import LIMITS
from guided.schema.document import parse, relaxed


def check(schema: Any) -> dict[str, Any] | bool:
    return parse(schema, "json_schema", [])


def refusal(schema: Any) -> InvalidConstraint:
    with pytest.raises(InvalidConstraint) as caught:
        check(schema)
    assert caught.value.param == "json_schema"
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(
    "schema",
    [{}, True, {"type": "object"}, '{"type": "string"}', "true", MappingProxyType({})],
)
def test_objects_booleans_and_their_texts_are_schemas(schema: Any) -> None:
    expected = json.loads(schema) if isinstance(schema, str) else schema
    assert check(schema) == (
        dict(expected) if isinstance(expected, MappingProxyType) else expected
    )


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an array"),
        (False, "no value satisfies"),
        ('{"minimum": 1e999}', "Out of range float"),
        ({"minimum": 10**100}, "a number has more than 100 characters"),
        ({"enum": [{1, 2}]}, "set is not JSON"),
        ({"const": "\x00"}, "NUL"),
        ('{"title": "\\ud800"}', "lone surrogate"),
    ],
)
def test_what_is_no_json_document(schema: Any, message: str) -> None:
    assert message in str(refusal(schema))


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        (
            {"properties": {"reason": {"type": "stsring"}}},
            "/properties/reason/type",
            "did you mean 'string'?",
        ),
        ({"type": 1}, "/type", "'type'"),
        ({"multipleOf": 0}, "/multipleOf", "0"),
        ({"$defs": {"a/b~c": {"type": 0}}}, "/$defs/a~1b~0c/type", "0"),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "/$schema",
            "draft 4 or a later one",
        ),
    ],
)
def test_what_is_no_schema_says_where(schema: Any, pointer: str, message: str) -> None:
    error = refusal(schema)
    assert error.pointer == pointer
    assert message in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {
            "enum": ["type", {"type": "nonsense"}],
            "default": {"$ref": "nowhere"},
            "examples": [{"items": 1}],
        },
        {"const": {"$ref": "http://example.com/", "properties": 1}},
        {
            "properties": {
                "items": {},
                "$ref": {},
                "enum": {"type": "string"},
                "not": True,
            }
        },
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "("},  # syntax is judged where it is compiled
        {"not": {"minLength": 5, "maxLength": 3}},
        {"properties": {"next": {"$ref": "#"}}},
        {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "string"}}},
        {
            "$id": "https://example.com/root",
            "$ref": "a",
            "$defs": {"a": {"$id": "a", "type": "string"}},
        },
        {
            "$ref": "#/components/schemas/A~1b%25",
            "components": {"schemas": {"A/b%": {"type": "string"}}},
        },
    ],
)
def test_what_is_a_schema(schema: Any) -> None:
    before = copy.deepcopy(schema)
    assert check(schema) == check(json.dumps(schema)) == before
    assert schema == before


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"$ref": "http://example.com/a.json"}, "/$ref", "nothing is fetched"),
        ({"$ref": "#/$defs/a"}, "/$ref", "leads to nothing"),
        (
            {"$ref": "/$defs/Name", "$defs": {"Name": {}}},
            "/$ref",
            "did you mean '#/$defs/Name'?",
        ),
        ({"$ref": "#/required", "required": ["a"]}, "/required", "not an array"),
        (
            {"$ref": "#/x-other/a", "x-other": {"a": {"type": "nonsense"}}},
            "/x-other/a/type",
            "nonsense",
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            None,
            "never ends",
        ),
    ],
)
def test_references_that_lead_nowhere(
    schema: Any, pointer: str | None, message: str
) -> None:
    error = refusal(schema)
    assert message in error.message
    if pointer is not None:
        assert error.pointer == pointer


def test_what_is_noted_is_bounded() -> None:
    misspelt = {f"maxLenght{'' if number == 0 else number}": 1 for number in range(9)}
    unknown = {f"unknown{number}": 0 for number in range(1_000)}
    for schema, pointers in (
        (
            {
                "enum": ["a"],
                "properties": {"é" * 100_000: misspelt | {"format": "nonesuch"}},
            },
            {"/properties"},
        ),
        ({"type": "object", "requird": ["a"], **unknown}, {"/requird"}),
        ({"type": "object", **unknown, "requird": ["a"]}, set()),
    ):
        notes: list[str] = []
        parse(schema, "json_schema", notes)
        assert {note.partition(" ")[0] for note in notes} == pointers


class TestSizes:
    def test_nesting_of_objects_is_found_without_recursion(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(5000):
            schema = {"items": schema}
        assert "too deep" in str(refusal(schema))
        loop: dict[str, Any] = {}
        loop["items"] = loop
        assert "Circular reference" in str(refusal(loop))

    def test_as_deep_as_it_may_be(self) -> None:
        for keyword in ("items", "not", "additionalProperties"):
            schema: dict[str, Any] = {"type": "string"}
            for _ in range(LIMITS.max_schema_nesting - 1):
                schema = {keyword: schema}
            check(schema)
            refusal({keyword: schema})

    def test_bytes(self) -> None:
        long = "x" * LIMITS.max_constraint_bytes
        assert isinstance(refusal({"title": long}), ConstraintTooLarge)
        assert isinstance(refusal('{"title":"' + long + '"}'), ConstraintTooLarge)

    @pytest.mark.parametrize(
        ("schema", "pointer"),
        [
            (
                {"properties": {"a": {"enum": list(range(10_001))}}},
                "/properties/a/enum",
            ),
            ({"items": {"minLength": 10_001}}, "/items/minLength"),
            ({"minItems": 10**30}, "/minItems"),
            ({"pattern": "a{10001}"}, "/pattern"),
            ({"patternProperties": {"a{10001}": {}}}, "/patternProperties/a{10001}"),
            ({"pattern": "(" * 500}, "/pattern"),
        ],
    )
    def test_counts(self, schema: Any, pointer: str) -> None:
        error = refusal(schema)
        assert isinstance(error, ConstraintTooLarge)
        assert error.pointer == pointer

    @pytest.mark.parametrize(
        "schema",
        [
            {
                "properties": {
                    "k" * 200_000: {"anyOf": [{}] * 1_900},
                    **{f"{i}": {} for i in range(10_000)},
                }
            },
            {
                "enum": ["a", *(i * (2**61 - 1) for i in range(9_000))]
            },  # integers with equal hashes
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "enum": ["a", None, *range(9_000), {}],
            },
            {
                "$ref": "#/x/0",
                "x": [*({"$ref": f"#/x/{i + 1}"} for i in range(4_000)), {}],
            },
            "{" + ",".join(f'"k{i}":0' for i in range(20_000)) + "}",
        ],
        ids=lambda schema: str(schema)[:30],
    )
    def test_the_time_is_linear_in_the_size(self, schema: Any) -> None:
        # Each took tens of seconds, or gigabytes: the suite's own timeout is what fails
        # here.
        check(schema)


@pytest.mark.parametrize(
    ("part", "free"),
    [
        ({"type": "float"}, "/properties/a"),
        ({"type": "STRING", "maxLength": 3}, "/properties/a"),
        ("string", "/properties/a"),
        (
            {"type": "array", "items": [{"type": "string"}], "prefixItems": [{}]},
            "/properties/a",
        ),
        ({"type": "array", "items": {"type": "dict"}}, "/properties/a/items"),
        ({"anyOf": [{"type": "any"}, {"type": "null"}]}, "/properties/a/anyOf/0"),
        (
            {"type": "object", "properties": {"not": {"type": "text"}}},
            "/properties/a/properties/not",
        ),
        ({"oneOf": [{"type": "text"}, {"type": "null"}]}, "/properties/a"),
        ({"not": {"type": "text"}}, "/properties/a"),
        ({"type": "integer", "enum": ["1", "2"]}, "/properties/a"),
        (
            {"type": "array", "items": {"type": "string"}, "enum": ["x"]},
            "/properties/a",
        ),
        ({"$ref": "#/$defs/nothing"}, "/properties/a"),
        ({"type": ["integer", "string"], "enum": ["1", "2"]}, None),
    ],
)
def test_relaxed_frees_the_smallest_subschema(part: Any, free: str | None) -> None:
    sent = {
        "type": "object",
        "properties": {"a": part, "b": {"type": "boolean"}},
        "required": ["b"],
    }
    before = json.dumps(sent)
    notes: list[str] = []
    document = parse(relaxed(sent, (), []), "json_schema", notes)
    assert isinstance(document, dict)
    assert notes == ([] if free is None else [free])
    assert document["properties"]["b"] == {"type": "boolean"}
    assert document["required"] == ["b"]
    assert json.dumps(sent) == before


def test_relaxed_frees_all_where_no_part_is_at_fault() -> None:
    sent = {"type": "object", "required": "a", "properties": {"a": {}}}
    notes: list[str] = []
    assert parse({**relaxed(sent, (), []), "type": "object"}, "json_schema", notes) == {
        **relaxed({}, [""], []),
        "type": "object",
    }
    assert notes == [""]


def test_relaxed_frees_what_a_library_refused() -> None:
    parts = {"a": {"type": "string", "pattern": "["}, "b": {"$ref": "#/$defs/c"}}
    sent = {"properties": parts, "$defs": {"c": {"type": "array", "uniqueItems": True}}}
    notes: list[str] = []
    parse(
        relaxed(sent, ["/properties/a/pattern", "/$defs/c/uniqueItems"], []),
        "json_schema",
        notes,
    )
    assert notes == ["/properties/a", "/$defs/c"]


def test_relaxed_frees_the_owner_of_a_pattern_property() -> None:
    sent = {
        "properties": {
            "a": {"patternProperties": {"(": {"type": "string"}}},
            "b": {"type": "null"},
        }
    }
    notes: list[str] = []
    parse(
        relaxed(sent, ["/properties/a/patternProperties/("] * 2, []),
        "json_schema",
        notes,
    )
    assert notes == ["/properties/a"]


def test_relaxed_frees_many_faults() -> None:
    sent = {"properties": {f"p{index}": {"type": "float"} for index in range(50)}}
    notes: list[str] = []
    parse(relaxed(sent, (), []), "json_schema", notes)
    assert notes == [f"/properties/p{index}" for index in range(50)]
