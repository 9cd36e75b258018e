"""What the canonical form rewrites is enforced by llguidance: a schema and an instance are drawn together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_vocabulary import BYTES, tokens

from guided.backends.llguidance import LLGuidanceBackend
from guided.constraint import Constraint
from guided.errors import TokenRejected

BACKEND = LLGuidanceBackend(BYTES)


def accepts(schema: Any, value: Any) -> bool:
    matcher = BACKEND.compile(Constraint.json_schema(schema, strict_schema=True)).matcher()
    try:
        matcher.accept_tokens(tokens(json.dumps(value, ensure_ascii=False)))
    except TokenRejected:
        return False
    return matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "not": {"enum": ["a", "abc"]}}, ["", "ab", "abcd", "b", "aé"], ["a", "abc"]),
        ({"type": "string", "not": {"pattern": "^(ab)*$"}}, ["a", "aba", "\n"], ["", "ab", "abab"]),
        ({"minProperties": 1, "properties": {"a": {}, "b": {}}, "type": "object"}, [{"a": 1}, {"c": 1}], [{}]),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "maxLength": 3}},
            [{}, {"abc": 1}],
            [{"abca": 1}, {"d": 1}],
        ),
        (
            {
                "properties": {"a": {"type": "array"}},
                "patternProperties": {".*": {"$ref": "#/$defs/t"}},
                "type": "object",
            }
            | {"$defs": {"t": {"type": ["array", "null"], "items": {"$ref": "#/$defs/t"}}}},
            [{"a": [None]}, {"b": None}],
            [{"a": None}, {"a": [1]}, {"b": 1}],
        ),
        (
            {"$defs": {"t": {"type": "object", "additionalProperties": {"$ref": "#/$defs/t", "minProperties": 1}}}}
            | {"$ref": "#/$defs/t"},
            [{}],
            [{"a": {}}],
        ),
    ],
)
def test_rewritten_for_llguidance(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [accepts(schema, value) for value in good] == [True] * len(good)
    assert [accepts(schema, value) for value in bad] == [False] * len(bad)
