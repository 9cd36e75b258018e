"""Tests specific to lm-format-enforcer: invalid JSON that it accepts, spaces, and
characters byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_vocabulary import BYTES, accepts, tokens

from guided.backends import Backends, candidates
from guided.backends.lmformatenforcer import LMFormatEnforcerBackend
from guided.constraint import Constraint
from guided.errors import TokenRejected, UnsupportedConstraint

LISTS: Any = {
    "anyOf": [
        {"items": {"type": "null"}, "maxItems": 2},
        {"items": {"type": "boolean"}, "minItems": 2},
    ]
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"type": "object", "properties": {"a": {}, "b": {}}},
            ['{"b":1,"a":[{}]}'],
            ['{"a":1,}', '{"c":1}'],
        ),
        (
            {"type": "array", "items": {"type": "integer"}},
            ["[1, -20]"],
            ["[1,]", "[1e-5]", "[-0.5]"],
        ),
        ({"type": "number"}, ["-0.5e5", "-0.5", "0"], ["1.e5", "01", "1 "]),
        ({"type": "string"}, ['" a\\u00e9 狐"'], ['"a\tb"', '"\\x"', '"\\ud83d"']),
        (
            {"type": "string", "maxLength": 2},
            ['"  "', '"狐狸"', '""'],
            ['"   "', '"狐狸a"'],
        ),
        (
            {"type": "string", "pattern": "^ [^é]$"},
            ['" a"', '" 狐"'],
            ['"  a"', '" é"', '" ""'],
        ),
        (
            {"enum": [" a b", "狐", 1, None]},
            ['" a b"', '"狐"', "1", "null"],
            ['"a b"', "false"],
        ),
        (
            {
                "type": "object",
                "required": ["k"],
                "additionalProperties": {"type": "null"},
            },
            ['{"k":null}'],
            ["{}"],
        ),
        (
            {"type": "array", "items": {"type": "array"}, "minItems": 2},
            ["[[1] , []]"],
            ["[[]]", "[]"],
        ),
        (
            LISTS,
            ["[null]", "[true,true]", "[]"],
            ["[true]", "[null,true]", "[null,null,null]"],
        ),
    ],
    ids=str,
)
def test_enforced_or_checked(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = Backends(BYTES)["lm-format-enforcer"].compile(
        Constraint("json_schema", json.dumps(schema))
    )
    assert "" in grammar.checked
    assert [text for text in (*valid, *invalid) if accepts(grammar, text)] == valid


def test_auto_does_not_take_it() -> None:
    assert candidates("json_object") == ("llguidance", "xgrammar")
    assert candidates("json_object", "lmfe") == ("lm-format-enforcer",)
    with pytest.raises(
        UnsupportedConstraint, match="these do: llguidance, xgrammar, outlines"
    ):
        candidates("regex", "lm-format-enforcer")


def test_a_strict_schema_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match="choose llguidance"):
        LMFormatEnforcerBackend(BYTES).compile(
            Constraint.json_schema({"type": "object"}, strict_schema=True)
        )


COLOUR: Any = {"enum": ["red", "blue"]}
TREE: Any = {
    "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/T"}}, {"type": "boolean"}]
}


@pytest.mark.parametrize(
    ("definitions", "begun", "others"),
    [
        ({"T": COLOUR}, ['{"a": "r', '{"a": "blue"'], ['{"a": "x', '{"a": 1']),
        ({"T": {"const": 7}}, ['{"a": 7'], ['{"a": "', '{"a": n']),
        (
            {"T": {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}, "C": COLOUR},
            ['{"a": n', '{"a": "b'],
            ['{"a": t'],
        ),
        ({"T": TREE}, ['{"a": t', '{"a": [n'], ['{"a": n']),
    ],
    ids=str,
)
def test_a_reference_to_alternatives_is_masked(
    definitions: Any, begun: list[str], others: list[str]
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/T"}},
        "required": ["a"],
        "$defs": definitions,
    }
    grammar = Backends(BYTES)["lm-format-enforcer"].compile(
        Constraint.json_schema(schema)
    )
    for text in begun:
        grammar.matcher().accept_tokens(tokens(text))
    for text in others:
        with pytest.raises(TokenRejected):
            grammar.matcher().accept_tokens(tokens(text))
