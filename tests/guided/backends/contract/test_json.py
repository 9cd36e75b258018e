"""JSON: whitespace, long numbers, schemas that are refused, random schemas."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from contract_cases import PERSON, is_json, stop

from guided.backends import BACKENDS, Backends
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}])
def test_a_model_that_repeats_digits_comes_to_an_end(
    backends: Backends, backend: str, vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    """A long number ends, while the digits of a string may be required."""
    for wanted in (schema, {"enum": ["1" * 60]}):
        worker = MaskWorker(vocabulary)
        worker.open(1, backends[backend].compile(Constraint.json_schema(wanted)))
        row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        output: list[int] = []
        while stop(vocabulary) not in output:
            assert worker.fill(1, output[-1:], row) is None
            allowed = allowed_ids(row).tolist()
            digits = [token for token in allowed if vocabulary.token_bytes[token].isdigit()]
            ends = [token for token in (stop(vocabulary), *vocabulary.encode("]")) if token in allowed]
            output.append([*digits[::-1], *ends, *allowed][0])
            assert len(output) < 200
        assert is_json(vocabulary.decode(output).decode(), wanted)


def test_a_number_in_a_structural_tag_ends_too(backends: Backends, vocabulary: Vocabulary) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    constraint = Constraint.structural_tag({"type": "structural_tag", "format": form})
    for backend in ("llguidance", "xgrammar"):
        worker = MaskWorker(vocabulary)
        row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        worker.open(1, backends[backend].compile(constraint), tokens=vocabulary.encode("<n>" + "1" * 40))
        assert worker.fill(1, (), row) is None
        assert not any(vocabulary.token_bytes[token][:1].isdigit() for token in allowed_ids(row))


def test_compact_whitespace(backends: Backends, backend: str, vocabulary: Vocabulary) -> None:
    compact = backends[backend].compile(Constraint.json_schema(PERSON, whitespace="")).matcher()
    with pytest.raises(TokenRejected):
        compact.fork().accept_tokens(vocabulary.encode('{"name": "Ada"'))
    compact.accept_tokens(vocabulary.encode('{"name":"A da","age":36,"tags":["math"]}'))
    assert compact.is_accepting()


def test_whitespace_as_json_is_usually_written(backends: Backends, backend: str, vocabulary: Vocabulary) -> None:
    usual = backends[backend].compile(Constraint.json_schema(PERSON))
    document = {"name": "A da", "age": 36, "tags": ["math"]}
    layouts: list[dict[str, Any]] = [{}, {"separators": (",", ":")}]
    if backend in ("llguidance", "xgrammar"):  # in a regex, line breaks would make the automaton much larger
        layouts += [{"indent": 2}, {"indent": "\t"}]
    for layout in layouts:
        matcher = usual.matcher()
        matcher.accept_tokens(vocabulary.encode(json.dumps(document, **layout)))
        assert matcher.is_accepting()
    with pytest.raises(TokenRejected):
        usual.matcher().accept_tokens(vocabulary.encode('{"name":' + " " * 60 + '"Ada"'))


def test_escaped_control_characters(backends: Backends, backend: str, vocabulary: Vocabulary) -> None:
    wanted, written = Constraint.json_object(), '{"a":"\\u0001"}'
    if backend == "outlines":  # its regex of strings has no other escapes, and that of any object takes seconds
        wanted, written = Constraint.json_schema(PERSON), '{"name":"\\n","age":1,"tags":[]}'
    matcher = backends[backend].compile(wanted).matcher()
    matcher.accept_tokens(vocabulary.encode(written))
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"exclusiveMaximum": 1}, "0." + "9" * 24),
        ({"exclusiveMaximum": 0.1}, "0.0" + "9" * 24),
        ({"exclusiveMinimum": -1}, "-0." + "9" * 24),
        ({"exclusiveMinimum": 0.25}, "0.25" + "0" * 24 + "1"),
        ({"exclusiveMinimum": 123456}, "123456." + "0" * 24 + "1"),
        ({"not": {"type": "integer"}}, "99." + "9" * 24),
    ],
)
def test_a_long_number_is_not_rounded_to_an_excluded_one(
    backends: Backends, backend: str, vocabulary: Vocabulary, schema: dict[str, Any], text: str
) -> None:
    try:
        grammar = backends[backend].compile(Constraint.json_schema({"type": "number", **schema}))
    except UnsupportedConstraint:
        return
    matcher = grammar.matcher()
    with contextlib.suppress(TokenRejected):
        matcher.accept_tokens(vocabulary.encode(text))
        assert not matcher.is_accepting()


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex("(unclosed"),
        Constraint.regex("a(?=b)"),
        Constraint.regex(r"(a)\1"),
        Constraint.json_schema({"type": "string", "pattern": "(?=a)b"}),
        Constraint.json_schema({"type": "string", "pattern": "^{2}times$"}),
        Constraint.json_schema({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}),
        Constraint.grammar("start: undefined_rule"),
        Constraint.grammar("root ::= undefined"),
        Constraint.grammar("this is no grammar"),
    ],
    ids=lambda constraint: constraint.source,
)
def test_what_cannot_be_enforced_is_refused(backends: Backends, backend: str, constraint: Constraint) -> None:
    """A malformed or unsupported constraint is an InvalidConstraint: not an internal error, and never ignored."""
    if constraint.kind not in BACKENDS[backend].kinds:
        pytest.skip(f"{backend} has no {constraint.kind}")
    try:
        grammar = backends[backend].compile(constraint)
    except InvalidConstraint as refusal:
        assert refusal.param == constraint.kind  # noqa: PT017
    else:
        # Some backends support it, or it is checked.
        assert "not" in constraint.source or "(?=a)" in constraint.source
        matcher = grammar.matcher()
        with contextlib.suppress(TokenRejected):
            matcher.accept_tokens(backends.vocabulary.encode('{"a":"x"}'))
            assert not matcher.is_accepting()
