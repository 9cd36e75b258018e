"""Keywords that neither outlines nor lm-format-enforcer enforces are refused by their place; others are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guided.backends.enforced_keywords import SchemaReader
from guided.backends.lmformatenforcer import _Reader as Enforcer
from guided.backends.outlines import _Reader as Outlines
from guided.errors import InvalidConstraint, UnsupportedConstraint

READERS = [Outlines, Enforcer]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "integer", "minimum": 3}, "/minimum"),
        ({"type": ["null", "number"], "multipleOf": 0.1}, "/multipleOf"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"items": {"contains": {"const": 1}}}, "/items/contains"),
        ({"properties": {"x~/y": {"type": "string", "not": {"pattern": "a"}}}}, "/properties/x~0~1y/not"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "/anyOf"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2}, "/maxLength"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/allOf"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "/oneOf"),
        ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}}, "/minLength"),
        ({"$defs": {"a": {"format": "date"}}, "items": {"$ref": "#/$defs/a"}}, "/$defs/a/format"),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, "/patternProperties"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "/maxProperties"),
        ({"enum": ["red"], "maxLength": 3}, "/maxLength"),
        ({"$ref": "#anchor"}, "/$ref"),
        ({"items": {"$id": "http://a/b"}}, None),
    ],
    ids=str,
)
def test_refusals(reader: type[SchemaReader], schema: Any, pointer: str | None) -> None:
    with pytest.raises(UnsupportedConstraint) as caught:
        reader(json.dumps(schema)).read_whole()
    assert caught.value.pointer == pointer


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"type": "null", "title": "t", "default": 1, "format": "unknown", "minimum": 2}, {"type": "null"}),
        ({"type": "string", "format": "unknown", "minLength": 0}, {"type": "string"}),
        ({"allOf": [{"$ref": "#/definitions/a"}], "definitions": {"a": {"type": "null"}}}, {"type": "null"}),
        ({"type": ["integer", "null"], "anyOf": [{"type": "number"}, {"type": "string"}]}, {"type": "integer"}),
        ({"type": ["null", "boolean"]}, {"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
        (
            {"properties": {"a": False, "b": {"type": "null"}}},
            {"type": "object", "properties": {"b": {"type": "null"}}},
        ),
        ({"minItems": 1, "items": {"type": "null"}}, {"type": "array", "items": {"type": "null"}, "minItems": 1}),
    ],
    ids=str,
)
def test_forms(reader: type[SchemaReader], schema: Any, form: Any) -> None:
    assert {"required": [], **reader(json.dumps(schema)).read_whole()} == {"required": [], **form}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "schema", [False, {"type": "string", "enum": [1]}, {"properties": {"a": False}, "required": ["a"]}]
)
def test_nothing_satisfies(reader: type[SchemaReader], schema: Any) -> None:
    with pytest.raises(InvalidConstraint, match="no value"):
        reader(json.dumps(schema)).read_whole()
