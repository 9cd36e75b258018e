"""Schemas as clients send them that are harmless and no valid JSON Schema, or another
dialect's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_vocabulary import BYTES, tokens

from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected
from guided.schema.document import parse, relaxed

BACKENDS = Backends(BYTES)


def allowed(constraint: Constraint, texts: list[str], backend: str) -> list[str]:
    """Return the texts that the mask allows as the whole output."""
    grammar = BACKENDS[backend].compile(constraint)
    accepted = []
    for text in texts:
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(tokens(text))
        except TokenRejected:
            continue
        if matcher.is_accepting():
            accepted.append(text)
    return accepted


def check(schema: Any) -> Any:
    return parse(schema, "json_schema", [])


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            {"type": ["integer", "boolean"], "nullable": True},
            ["null", "3", "true"],
            ['"a"'],
        ),
        ({"type": "integer", "enum": [3, 5], "nullable": True}, ["null", "5"], ["4"]),
        ({"const": "a", "nullable": True}, ["null", '"a"'], ['"b"']),
        (
            {"anyOf": [{"type": "boolean"}, {"enum": ["a"]}], "nullable": True},
            ["null", '"a"'],
            ["1"],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/P"}, {"type": "null"}], "nullable": True},
            ["null", '{"x": 1}'],
            ["1"],
        ),
        ({"$ref": "#/$defs/P", "nullable": True}, ["null", '{"x": 1}'], ["{}", "1"]),
        (
            {"allOf": [{"$ref": "#/$defs/P"}, {"required": ["x"]}], "nullable": True},
            ["null", '{"x": 1}'],
            ["{}"],
        ),
        ({"type": "integer", "nullable": False}, ["1"], ["null"]),
        ({"type": "integer", "nullable": "yes"}, ["1"], ["null"]),
    ],
)
def test_nullable_allows_null_beside_any_keyword(
    schema: dict[str, Any], texts: list[str], others: list[str], backend: str
) -> None:
    for whole in (schema, check(schema | {"$defs": {"P": POINT}})):
        constraint = Constraint.json_schema(whole | {"$defs": {"P": POINT}})
        assert allowed(constraint, [*texts, *others], backend) == texts


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_property_ordering_is_the_order_of_properties(backend: str) -> None:
    flags = {"p": {"type": "boolean"}, "q": {"type": "boolean"}}
    inner = {
        "type": "object",
        "properties": flags,
        "propertyOrdering": ["q", "p"],
        "required": ["p", "q"],
    }
    names = ["d", "unknown", 7, "b", "d"]
    properties = {"a": inner, "b": {"type": "null"}, "d": {"type": "null"}}
    schema = {
        "type": "object",
        "properties": properties,
        "propertyOrdering": names,
        "required": ["a", "b", "d"],
    }
    before = json.dumps(schema)
    texts = [
        '{"d": null, "b": null, "a": {"q": true, "p": true}}',
        '{"a": {"q": true, "p": true}, "b": null, "d": null}',
        '{"d": null, "b": null, "a": {"p": true, "q": true}}',
    ]
    assert (
        allowed(Constraint.json_schema(schema, open_objects=False), texts, backend)
        == texts[:1]
    )
    assert json.dumps(schema) == before


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "name",
    [
        "点",
        "List<Item>",
        "Page[str]",
        "a b",
        "100%",
        "F#",
        'say "x"',
        "{T}",
        "a\\b",
        "^|`",
    ],
)
def test_references_lead_to_the_place_that_their_text_names(
    name: str, backend: str
) -> None:
    schema = {"$ref": f"#/$defs/{name}", "$defs": {name: POINT}}
    assert allowed(
        Constraint.json_schema(schema), ['{"x": 1}', "{}", "1"], backend
    ) == ['{"x": 1}']
    with pytest.raises(InvalidConstraint, match="leads to nothing"):
        check({"$ref": f"#/$defs/{name}", "$defs": {"other": {}}})


@pytest.mark.parametrize(
    "identifiers",
    [
        {"$id": "My Model"},
        {"$id": "Page[int]"},
        {"$id": "1:2"},
        {"$id": "#/properties/x"},
        {"$id": "#model"},
        {"$id": ["x"]},
        {"$anchor": 4},
        {"id": "http://[::"},
        {"$anchor": "a b"},
        {"$anchor": "1"},
        {"$anchor": ""},
        {"$id": None, "$anchor": None},
    ],
)
def test_identifiers_that_are_no_uris_are_left_out(identifiers: dict[str, Any]) -> None:
    inner = {**identifiers, "$ref": "#/$defs/P"}
    schema = {**identifiers, "properties": {"x": inner}, "$defs": {"P": POINT}}
    assert check(schema) == {
        "properties": {"x": {"$ref": "#/$defs/P"}},
        "$defs": {"P": POINT},
    }


def test_an_identifier_that_a_reference_has_is_kept() -> None:
    for name in ("My Model", "Page[int]", "点"):
        constraint = Constraint.json_schema(
            {"$ref": name, "$defs": {"p": {"$id": name, **POINT}}}
        )
        assert allowed(constraint, ['{"x": 1}', "1"], "llguidance") == ['{"x": 1}']
        whole = Constraint.json_schema(
            {"$id": name, "$ref": f"{name}#/$defs/p", "$defs": {"p": POINT}}
        )
        assert allowed(whole, ['{"x": 1}', "1"], "llguidance") == ['{"x": 1}']


def test_annotations_of_a_wrong_type_and_null_keywords_are_left_out() -> None:
    annotations = {
        "title": 1,
        "description": ["a"],
        "$comment": {},
        "examples": {"a": 1},
        "readOnly": "no",
    }
    nulls = dict.fromkeys(
        (
            "minLength",
            "pattern",
            "enum",
            "anyOf",
            "$ref",
            "format",
            "additionalProperties",
            "title",
        )
    )
    kept = {"default": None, "examples": [None], "deprecated": True}
    part = {
        "type": "string",
        **annotations,
        **nulls,
        "contentEncoding": 4,
        "writeOnly": 0,
        "format": [],
        "contentSchema": "x",
    }
    sent = {
        "properties": {"title": part},
        "required": None,
        "items": {"not": part},
        "$ref": "#/x/y",
        "x": {"y": part},
    }
    left = {"type": "string"}
    assert check(sent) == {
        "properties": {"title": left},
        "items": {"not": left},
        "$ref": "#/x/y",
        "x": {"y": left},
    }
    assert check({"type": "string", **kept}) == {"type": "string", **kept}
    assert check({"const": None}) == {"const": None}
    values = {"enum": [{"title": 1, "minLength": None}], "default": {"title": None}}
    assert check(values) == values
    with pytest.raises(InvalidConstraint) as caught:
        check({"properties": {"a": {"type": None}}})
    assert caught.value.pointer == "/properties/a/type"


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_tuple_of_draft_7_is_one_without_schema_too(backend: str) -> None:
    pair = {
        "type": "array",
        "items": [{"type": "integer"}, {"$ref": "#/$defs/P"}],
        "additionalItems": False,
        "minItems": 2,
    }
    schema = {
        "type": "object",
        "properties": {"p": pair},
        "required": ["p"],
        "$defs": {"P": POINT},
    }
    constraint = Constraint.json_schema(schema, open_objects=False)
    texts = [
        '{"p": [1, {"x": 2}]}',
        '{"p": [{"x": 2}, 1]}',
        '{"p": [1]}',
        '{"p": [1, {"x": 2}, 3]}',
    ]
    assert allowed(constraint, texts, backend) == texts[:1]
    (note,) = constraint.not_enforced
    assert note.startswith("/properties/p/items (")
    assert "prefixItems" in note


def test_pointers_in_a_tuple_are_those_of_the_schema_as_sent() -> None:
    for part, place in (
        ({"type": "int"}, "/items/1/type"),
        ({"items": [{"minimum": ""}]}, "/items/1/items/0/minimum"),
    ):
        with pytest.raises(InvalidConstraint) as caught:
            check({"items": [{}, part]})
        assert caught.value.pointer == place


@pytest.mark.parametrize(
    "contradiction",
    [
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"properties": {"a": {"prefixItems": [{}]}}},
        {"$defs": {"a": {"$dynamicAnchor": "T"}}},
    ],
)
def test_a_tuple_in_a_schema_of_2020_says_what_to_write(
    contradiction: dict[str, Any],
) -> None:
    with pytest.raises(
        InvalidConstraint, match="'prefixItems', or '\\$schema'"
    ) as caught:
        check({**contradiction, "not": {"items": [{}]}})
    assert caught.value.pointer == "/not/items"


@pytest.mark.parametrize("style", ["json", "qwen_xml"])
def test_the_contents_of_structural_tags_are_read_alike(style: str) -> None:
    parameters = {
        "type": "object",
        "title": None,
        "properties": {"a": {"$ref": "#/$defs/A b", "nullable": True}},
    }
    parameters |= {
        "required": ["a"],
        "$defs": {"A b": {"type": "string", "pattern": r"^{[\w-.]}$"}},
    }
    tag = {"type": "json_schema", "json_schema": parameters, "style": style}
    before = json.dumps(tag)
    constraint = Constraint.structural_tag({"format": tag})
    texts = ['{"a": null}', '{"a": "{-}"}', '{"a": "x"}']
    if style == "qwen_xml":
        texts = [
            f"<parameter=a>\n{value}\n</parameter>\n" for value in ("null", "{-}", "x")
        ]
    assert allowed(constraint, texts, "llguidance") == texts[:2]
    assert json.dumps(tag) == before


def test_relaxed_schemas_are_read_alike() -> None:
    sent = {
        "properties": {
            "a": {"items": [{"type": "null"}]},
            "b": {"type": "float"},
            "c": {"pattern": "{"},
        },
        "title": 1,
    }
    notes: list[str] = []
    document = relaxed(sent, (), notes)
    assert [note.partition(" ")[0] for note in notes] == [
        "/properties/a/items",
        "/properties/b",
    ]
    assert document["properties"]["c"] == {"pattern": r"\{"}


@pytest.mark.parametrize(
    ("draft", "sent", "written"),
    [
        (
            4,
            {"minimum": 1, "exclusiveMinimum": True, "maximum": 9},
            {"exclusiveMinimum": 1, "maximum": 9},
        ),
        (
            4,
            {"maximum": 1, "exclusiveMaximum": False, "const": 1},
            {"maximum": 1, "const": 1},
        ),
        (6, {"items": [{"const": 1}], "if": {}}, {"items": [{"const": 1}], "if": {}}),
        (
            7,
            {"$ref": "#x", "type": "null", "definitions": {"a": {"$id": "#x"}}},
            {"$ref": "#x", "definitions": {"a": {"$anchor": "x"}}},
        ),
        (
            7,
            {"$id": "http://x.y/z#", "if": True, "dependencies": {}},
            {"$id": "http://x.y/z", "if": True, "dependencies": {}},
        ),
    ],
    ids=str,
)
def test_old_drafts_are_written_in_2019_09(draft: int, sent: Any, written: Any) -> None:
    uri = f"http://json-schema.org/draft-0{draft}/schema#"
    document = parse({"$schema": uri, **sent}, "json_schema", [])
    assert document == {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        **written,
    }
