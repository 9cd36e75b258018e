"""Tests specific to outlines-core: mistakes of its regexes, alternatives, the empty
text."""

from __future__ import annotations

from typing import Any

import pytest
from byte_vocabulary import BYTES, accepts

from guided.backends import Backends
from guided.backends.outlines import OutlinesBackend
from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint


@pytest.fixture(scope="module")
def backend() -> OutlinesBackend:
    return OutlinesBackend(BYTES)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number"}, ["1e+5", "-0.1E-7", "3"], ["1.", "01", "+1"]),
        ({"type": "string", "pattern": ".*"}, ['"a"'], ['"a"b"', '"\n"']),
        ({"type": "string", "maxLength": 2}, ['"é狐"', '""'], ['"abc"']),
        (
            {"enum": ["a|b", 12, {"k": [1]}]},
            ['"a|b"', "12", '{"k": [1]}', '{"k":[1]}'],
            ['"a', "1", '{"k":[2]}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, 'q"': {"type": "null"}},
                "required": ['q"'],
            },
            ['{"q\\"":null}', '{"a": null, "q\\"": null}'],
            ["{}", '{"a":null}', '{"q"":null}'],
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}},
            },
            ["null"],
            ["1"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
            ["[null]"],
            ["[null,null]", "[1]"],
        ),
        (
            {
                "type": "object",
                "properties": {"a": False},
                "minProperties": 1,
                "additionalProperties": {"const": None},
            },
            ['{"b":null}'],
            ["{}", '{"a":null}'],
        ),
        ({"type": "string", "format": "date"}, ['"2020-02-29"'], ['"x"']),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            ['{"a": [1]}', '{"a": "x"}'],
            ["{}", "1", '"x"'],
        ),
    ],
    ids=str,
)
def test_enforced_or_checked(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = Backends(BYTES)["outlines"].compile(Constraint.json_schema(schema))
    assert grammar.checked == ("",)
    assert [text for text in (*valid, *invalid) if accepts(grammar, text)] == valid


def test_a_regex_that_the_empty_text_matches_is_refused(
    backend: OutlinesBackend,
) -> None:
    with pytest.raises(UnsupportedConstraint, match="empty"):
        backend.compile(Constraint.regex("a*"))


def test_large_integers_are_refused(backend: OutlinesBackend) -> None:
    with pytest.raises(UnsupportedConstraint, match="as large as 1000000"):
        backend.compile(Constraint.json_schema({"items": {"enum": [1, 10**30]}}))
    backend.compile(
        Constraint.json_schema({"const": "1000000000000000000000000000000"})
    )
