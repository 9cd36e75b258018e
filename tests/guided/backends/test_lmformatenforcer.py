"""Tests specific to lm-format-enforcer: invalid JSON that it accepts, spaces, and characters byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_vocabulary import BYTES, accepts

from guided.backends import Backends, candidates
from guided.backends.lmformatenforcer import LMFormatEnforcerBackend
from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint

LISTS: Any = {"anyOf": [{"items": {"type": "null"}, "maxItems": 2}, {"items": {"type": "boolean"}, "minItems": 2}]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}}, ['{"b":1,"a":[{}]}'], ['{"a":1,}', '{"c":1}']),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, -20]"], ["[1,]", "[1e-5]", "[-0.5]"]),
        ({"type": "number"}, ["-0.5e5", "-0.5", "0"], ["1.e5", "01", "1 "]),
        ({"type": "string"}, ['" a\\u00e9 狐"'], ['"a\tb"', '"\\x"', '"\\ud83d"']),
        ({"type": "string", "maxLength": 2}, ['"  "', '"狐狸"', '""'], ['"   "', '"狐狸a"']),
        ({"type": "string", "pattern": "^ [^é]$"}, ['" a"', '" 狐"'], ['"  a"', '" é"', '" ""']),
        ({"enum": [" a b", "狐", 1, None]}, ['" a b"', '"狐"', "1", "null"], ['"a b"', "false"]),
        ({"type": "object", "required": ["k"], "additionalProperties": {"type": "null"}}, ['{"k":null}'], ["{}"]),
        ({"type": "array", "items": {"type": "array"}, "minItems": 2}, ["[[1] , []]"], ["[[]]", "[]"]),
        (LISTS, ["[null]", "[true,true]", "[]"], ["[true]", "[null,true]", "[null,null,null]"]),
    ],
    ids=str,
)
def test_enforced_or_checked(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = Backends(BYTES)["lm-format-enforcer"].compile(Constraint("json_schema", json.dumps(schema)))
    assert "" in grammar.checked
    assert [text for text in (*valid, *invalid) if accepts(grammar, text)] == valid


def test_auto_does_not_take_it() -> None:
    assert candidates("json_object") == ("llguidance", "xgrammar")
    assert candidates("json_object", "lmfe") == ("lm-format-enforcer",)
    with pytest.raises(UnsupportedConstraint, match="these do: llguidance, xgrammar, outlines"):
        candidates("regex", "lm-format-enforcer")


def test_a_strict_schema_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match="choose llguidance"):
        LMFormatEnforcerBackend(BYTES).compile(Constraint.json_schema({"type": "object"}, strict_schema=True))
