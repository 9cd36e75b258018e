"""Random walks through the masks: every text that a backend allows for a schema
satisfies the schema.

A backend may refuse a schema. It may not call it unsatisfiable if another one finds a
value.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from contract_cases import walk
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_constraints.validation import FORMATS, problem
from benchmarks.random_outputs import random_case, run_case
from guided.backends import BACKENDS, Backends
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary

DRAFT7 = "http://json-schema.org/draft-07/schema#"
NULL, BOOLEAN, INTEGER = {"type": "null"}, {"type": "boolean"}, {"type": "integer"}
EMPTY_OBJECT = {"type": "object", "required": ["zz"], "additionalProperties": False}
KNOWN: list[Any] = [
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25},
    {"type": "number", "minimum": -0.25, "exclusiveMaximum": 0},
    {"type": "number", "minimum": 2147483649, "exclusiveMaximum": 2147483651},
    *(
        {"type": "integer", side: sign * 2**power + step}
        for side in ("minimum", "maximum")
        for sign in (-1, 1)
        for power in (53, 70)
        for step in (-1, 1)
    ),
    {"type": "integer", "minimum": 2**53, "exclusiveMaximum": 2**53 + 2},
    {"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
    {"enum": [-(2**63), 2**64 - 1, 1e300]},
    {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
    {"type": "integer", "multipleOf": 65539, "minimum": 1, "maximum": 10**15},
    {"type": "string", "pattern": "^[\\x00-\\x1f]$"},
    {"type": "string", "pattern": "^[^\\x20-\\uffff]$"},
    {"type": "string", "pattern": "^\\p{Lu}[é-ÿ]+$"},
    {"type": "string", "pattern": "^[]a]$"},
    {"type": "string", "pattern": "^ab|ab$"},
    {"enum": ["a\n", "a", "٣"], "pattern": "^(a|\\d)$"},
    {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "string", "pattern": "^[\\x01-\\x07]z$"}},
    },
    *(
        {
            "type": "object",
            "required": ["a"],
            "additionalProperties": False,
            "properties": {"a": value},
        }
        for value in (
            {"enum": ["\x01q", "b"]},
            {"const": "q\x7f"},
            {"type": "string", "pattern": "^\\x1bq$"},
        )
    ),
    {
        "type": "object",
        "required": ["créer"],
        "properties": {"créer": NULL},
        "additionalProperties": False,
    },
    {"type": "object", "minProperties": 2},
    {
        "$schema": DRAFT7,
        "type": "array",
        "items": {"$ref": "#/definitions/a", **NULL},
        "definitions": {"a": BOOLEAN},
    },
    {
        "type": "array",
        "prefixItems": [NULL, BOOLEAN],
        "items": INTEGER,
        "minItems": 2,
        "maxItems": 3,
    },
    {
        "type": "array",
        "items": {"anyOf": [NULL, {"type": "array", "items": NULL, "minItems": 2}]},
        "maxItems": 2,
    },
    {
        "type": "object",
        "properties": {"a": NULL, "b": NULL},
        "minProperties": 1,
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^(a+b)?$"},
    {"type": "string", "pattern": '^["\\\\]$'},
    {"type": "array", "maxItems": 0, "items": EMPTY_OBJECT},
    {"type": "array", "items": {"type": "integer", "minimum": 1.2, "maximum": 1.8}},
    {"type": "string", "minLength": 40, "maxLength": 60},
    *({"type": "string", "format": name} for name in FORMATS),
]


@pytest.mark.parametrize("schema", KNOWN, ids=lambda schema: json.dumps(schema)[:60])
def test_what_once_went_wrong(
    backends: Backends, vocabulary: Vocabulary, schema: Any
) -> None:
    invalid, found = [], []
    sent = json.dumps(schema)
    vague = sent.count('"array"') > sent.count('"items"') or sent.count(
        '"object"'
    ) > sent.count('"properties"')
    for backend in BACKENDS:
        if backend == "outlines" and (vague or "type" not in schema):
            continue  # it compiles any value for a minute
        try:
            grammar = backends[backend].compile(Constraint.json_schema(schema))
        except UnsupportedConstraint as refusal:
            assert "Error" not in refusal.message, refusal  # noqa: PT017 -- an unexpected exception
            continue
        except InvalidConstraint:
            invalid.append(backend)
            continue
        generator = random.Random(5)
        for _ in range(6):
            written = walk(grammar.matcher(), vocabulary, generator, 70)
            if written is not None:
                text = written.decode()
                found.append((backend, text))
                assert problem(text, schema) is None, (
                    backend,
                    text,
                    problem(text, schema),
                )
    assert not (invalid and found), (invalid, found)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
def test_no_character_beside_the_surrogates_slips_through(
    backends: Backends, backend: str
) -> None:
    matcher = backends[backend].compile(Constraint.regex(r"[^ -\uffff]")).matcher()
    for character in "\ud7ff\ue000":
        with pytest.raises(TokenRejected):
            matcher.fork().accept_tokens(backends.vocabulary.encode(character))
    matcher.accept_tokens(backends.vocabulary.encode("😀"))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "lm-format-enforcer"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(number=st.integers(0, 10**6))
def test_random_constraints_of_all_kinds(
    backends: Backends, backend: str, number: int
) -> None:
    """A small part of `python -m benchmarks.random_outputs`, which also compiles with
    outlines and survives crashes."""
    case = random_case(1, number)
    for result in run_case(backends, case, backend, random.Random(number), 3, 60):
        assert result.outcome in ("stop", "cut", "refused", "not met"), (
            case.value,
            result,
        )
