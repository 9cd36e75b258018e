"""Constraints are canonical, and invalid ones are refused before native code gets
them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint


class TestCanonical:
    def test_equal_constraints_have_equal_keys_in_every_process(self) -> None:
        schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
        one = Constraint.json_schema(schema)
        other = Constraint.json_schema(json.dumps(schema, indent=3))
        assert one == other
        assert one.key == other.key == pickle.loads(pickle.dumps(one)).key
        assert hash(one) == hash(other)
        assert len(one.key) == 32

    def test_all_that_differs_has_different_keys(self) -> None:
        constraints = [
            Constraint.json_schema({"type": "object"}),
            Constraint.json_schema({"type": "object"}, whitespace=""),
            Constraint.json_schema({"type": "object"}, whitespace="[ ]?"),
            Constraint.json_schema({"type": "object", "properties": {"a": {}}}),
            Constraint.json_schema(
                {"type": "object", "properties": {"a": {}}}, open_objects=False
            ),
            Constraint.json_object(),
            Constraint.json_object(whitespace=""),
            Constraint.regex("a"),
            Constraint.grammar("a"),
            Constraint.choice(["a"]),
            Constraint.choice(["a", "b"]),
            Constraint.choice(["b", "a"]),
        ]
        assert (
            len({constraint.key for constraint in constraints})
            == len(set(constraints))
            == len(constraints)
        )

    def test_choices_come_back_once_each_and_in_order(self) -> None:
        options = ["b", "a", "b", 'quo"te\\', "é\n"]
        assert Constraint.choice(options).value == ["b", "a", 'quo"te\\', "é\n"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("", "empty"),
            ("a\x00b", "NUL"),
            ("\ud800", "not valid Unicode"),
            (None, "must be a string, not NoneType"),
        ],
    )
    def test_regexes(self, pattern: Any, message: str) -> None:
        with pytest.raises(InvalidConstraint, match=message) as caught:
            Constraint.regex(pattern, param="guided_regex")
        assert caught.value.param == "guided_regex"

    @pytest.mark.parametrize(
        "text", ["", " \n\t ", "root ::= \x00", "root ::= " + "(" * 30_000, 7]
    )
    def test_grammars(self, text: Any) -> None:
        with pytest.raises(InvalidConstraint) as caught:
            Constraint.grammar(text)
        assert caught.value.param == "grammar"

    @pytest.mark.parametrize(
        ("choices", "pointer"),
        [
            ([], None),
            ("yes", None),
            ([""], "/0"),
            (["a", 1], "/1"),
            (["a", "b\x00"], "/1"),
            (["\ud800"], "/0"),
        ],
    )
    def test_choices(self, choices: Any, pointer: str | None) -> None:
        with pytest.raises(InvalidConstraint) as caught:
            Constraint.choice(choices)
        assert (caught.value.param, caught.value.pointer) == ("choice", pointer)

    def test_what_is_echoed_is_bounded(self) -> None:
        with pytest.raises(InvalidConstraint) as caught:
            Constraint.json_schema(
                {"properties": {"k" * 100_000: {"type": "t" * 100_000}}}
            )
        assert len(caught.value.message) < 1000


_DOUBT = "no keyword of JSON Schema restricts this document"
_INSTANCE = f" ({_DOUBT}: it looks like an instance, not like a schema; did you mean"


@pytest.mark.parametrize(
    ("schema", "notes"),
    [
        ({"format": "semver"}, ("/format",)),
        (
            {"properties": {"a/b": {"type": ["string", "null"], "format": "topic"}}},
            ("/properties/a~1b/format",),
        ),
        ({"type": "string", "$defs": {"unused": {"format": "semver"}}}, ()),
        (
            {"type": "string", "maxLenght": 3},
            ("/maxLenght (did you mean 'maxLength'?)",),
        ),
        (
            {
                "type": "string",
                "x-own": 1,
                "nullable": True,
                "_format": "date",
                "contentEncoding": "base64",
            },
            (),
        ),
        ({"properties": {"maxLenght": {}}}, ()),
        ({"sku": 7}, (f'{_INSTANCE} {{"properties": {{"sku": ...}}}}?)',)),
        (
            {"title": "Invoice", "sum": 3},
            (f'{_INSTANCE} {{"properties": {{"sum": ...}}}}?)',),
        ),
        (
            {
                "openapi": "3.1.0",
                "components": {"schemas": {"A/b": {"type": "string"}}},
            },
            (
                f' ({_DOUBT}: choose one of its schemas, as with "$ref": "#/components/schemas/A~1b" at its root)',
            ),
        ),
        (
            {"swagger": "2.0", "definitions": {"Pet": {}}},
            (
                f' ({_DOUBT}: choose one of its schemas, as with "$ref": "#/definitions/Pet" at its root)',
            ),
        ),
        (
            {
                "components": {"schemas": {"A": {"format": "semver"}}},
                "$ref": "#/components/schemas/A",
            },
            ("/components/schemas/A/format",),
        ),
        ({"title": "anything", "description": "goes"}, ()),
    ],
)
def test_what_is_not_enforced_is_noted(
    schema: dict[str, Any], notes: tuple[str, ...]
) -> None:
    constraint = Constraint.json_schema(schema)
    assert constraint.not_enforced == notes
    assert constraint == Constraint(constraint.kind, constraint.source)


def test_strict_schema_refuse_unknown_ones() -> None:
    Constraint.json_schema({"format": "uuid", "maxLenght": 1}, strict_schema=True)
    with pytest.raises(UnsupportedConstraint, match="'semver'") as caught:
        Constraint.json_schema({"items": {"format": "semver"}}, strict_schema=True)
    assert caught.value.pointer == "/items/format"


@pytest.mark.parametrize(
    ("kind", "field"),
    [("json_schema", "json_schema"), ("regex", "pattern"), ("choice", "choice")],
)
def test_a_checked_constraint_is_a_part_of_a_tag(kind: Any, field: str) -> None:
    value: Any = {"json_schema": {}, "regex": "a+", "choice": ["b"]}[kind]
    part = Constraint.of_kind(kind, value, param="sent")
    whole = Constraint.structural_tag(
        {"format": {"type": kind, field: part}}, param="whole"
    )
    plain = Constraint.structural_tag(
        {"format": {"type": kind, field: value}}, param="whole"
    )
    assert whole == plain
    [(pointer, content)] = whole.contents.items()
    assert (pointer, content.value) == (f"/format/{field}", value)
    assert (content.param, content.pointer) == ("whole", pointer)
    assert (part.param, part.pointer) == ("sent", "")


def test_a_content_of_a_tag_keeps_its_notes() -> None:
    schema = {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "nonsense"}},
    }
    tag = Constraint.structural_tag(
        {"format": {"type": "json_schema", "json_schema": schema}}
    )
    assert tag.not_enforced == ("/format/json_schema/properties/d/format",)
    [content] = tag.contents.values()
    assert content.not_enforced == ("/properties/d/format",)
    whole = {
        "type": "sequence",
        "elements": [{"type": "json_schema", "json_schema": content}],
    }
    notes = Constraint.structural_tag({"format": whole}).not_enforced
    assert notes == ("/format/elements/0/json_schema/properties/d/format",)
