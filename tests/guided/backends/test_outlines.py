"""Tests specific to outlines-core: mistakes of its regexes, alternatives, the empty text, cached masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import outlines_core
import pytest

from guided.backends import candidates
from guided.backends.base import CompiledGrammar
from guided.backends.mask_cache import MaskCache
from guided.backends.outlines import OutlinesBackend
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary

BYTES = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0, 257), frozenset({0}), 288)


@pytest.fixture(scope="module")
def backend() -> OutlinesBackend:
    return OutlinesBackend(BYTES)


def fits(grammar: CompiledGrammar, text: str) -> bool:
    state = grammar.matcher()
    try:
        state.accept_tokens([byte + 1 for byte in text.encode()])
    except TokenRejected:
        return False
    return state.is_accepting()


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"type": "array", "not": {"uniqueItems": True}}, "not", "/not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains", "/contains"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf", "/multipleOf"),
        ({"type": "number", "minimum": 0.5}, "minimum", "/minimum"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreference", "/pattern"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": {}, "minProperties": 1}, "p", None),
        ({"type": "object", "minProperties": 2}, "minProperties", "/minProperties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties", "/maxProperties"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}, "type": "array"}}}, "recursive", None),
    ],
)
def test_what_it_would_ignore_is_refused_by_name(
    backend: OutlinesBackend, schema: Any, keyword: str, pointer: str | None
) -> None:
    with pytest.raises(UnsupportedConstraint, match=keyword) as caught:
        backend.compile(Constraint.json_schema(schema))
    if pointer is not None:
        assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "-3", "3.0"]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.5", "1", "1.0"], ["1.5", "-0.5", "2"]),
        (
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
            ["0.5", "1.99"],
            ["0", "2", "1.99999999999999999999", "0.00000000000000000001"],
        ),
        ({"type": "number"}, ["1e5", "-0.1E-7", "3"], ["1.", "01", "+1"]),
        ({"type": "string", "pattern": ".*"}, ['"a"', '"\\""'], ['"a"b"', '"\n"']),
        ({"type": "string", "pattern": '^a"$'}, ['"a\\""'], ['"a""', '"a"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "string", "maxLength": 2}, ['"ab"', '""'], ['"abc"']),
        ({"type": "string", "format": "time"}, ['"12:00:00Z"'], ['"12:00:00"', '"25:00:00Z"']),
        ({"type": "string", "format": "email"}, ['"a@b.cd"'], ['"a"', '""a"@b.cd"']),
        ({"enum": ["a|b", 12, {"k": [1]}]}, ['"a|b"', "12", '{"k": [1]}', '{"k":[1]}'], ['"a', "1", '{"k":[2]}']),
        (
            {"type": "object", "properties": {"a": {"type": "null"}, 'q"': {"type": "null"}}, "required": ['q"']},
            ['{"q\\"":null}', '{"a": null, "q\\"": null}'],
            ["{}", '{"a":null}', '{"q"":null}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}]},
            ['{"a":null}'],
            ["{}"],
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}, ["null"], ["1"]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[null]"], ["[null,null]", "[1]"]),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
            ["[null]"],
            ["[]", "[null,null,null]"],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
        ({"type": "object", "additionalProperties": {"type": "null"}}, ["{}", '{"a":null}'], ['{"a":1}']),
    ],
)
def test_what_its_own_regex_would_get_wrong(
    backend: OutlinesBackend, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    grammar = backend.compile(Constraint.json_schema(schema))
    for text in valid:
        assert fits(grammar, text), text
    for text in invalid:
        assert not fits(grammar, text), text


def test_any_value_among_others(backend: OutlinesBackend) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "required": ["a", "b"]}
    grammar = backend.compile(Constraint.json_schema(schema, whitespace=""))
    for value in ("null", "1", '"x"', "[1]", '{"k":true}'):
        assert fits(grammar, f'{{"a":{value},"b":null}}')
        assert not fits(grammar, value)


def test_numbers_that_look_like_our_marks_are_not_taken_for_them(backend: OutlinesBackend) -> None:
    for value in (7_310_000_000_000_000, [7_310_000_000_000_001]):
        schema = {"type": "array", "prefixItems": [{"const": value}, {"type": "integer", "minimum": 5}], "minItems": 2}
        grammar = backend.compile(Constraint.json_schema(schema))
        assert fits(grammar, json.dumps([value, 7]))
        assert not fits(grammar, json.dumps([5, 7]))
    with pytest.raises(UnsupportedConstraint, match="numbers from"):
        backend.compile(Constraint.json_schema({"const": "7310000000000000"}))


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("yes|yes please", ["yes", "yes please"], ["", "yes "]),
        ("(a|ab)(c|bcd)", ["ac", "abc", "abcd", "abbcd"], ["ab"]),
        ("a*?b??", ["", "a", "aab"], ["ba"]),
        ("[a-z]*", ["", "abc"], ["A"]),
        ("a+é?", ["aé", "aa"], ["é"]),
    ],
)
def test_regexes_match_as_a_whole(backend: OutlinesBackend, pattern: str, valid: list[str], invalid: list[str]) -> None:
    constraint = Constraint.regex(pattern)
    compiled = backend.compile(constraint)
    for grammar in (compiled, backend.load(constraint, compiled.dump())):
        assert all(fits(grammar, text) for text in valid)
        assert not any(fits(grammar, text) for text in invalid)


def test_only_the_empty_text(backend: OutlinesBackend) -> None:
    with pytest.raises(UnsupportedConstraint, match="empty"):
        backend.compile(Constraint.regex("^$"))


def test_both_stop_tokens_end_it_and_can_be_taken_back(backend: OutlinesBackend) -> None:
    grammar = backend.compile(Constraint.choice(["ab"]))
    for stop in BYTES.stop_token_ids:
        state = grammar.matcher()
        with pytest.raises(TokenRejected):
            state.fork().accept_tokens([stop])
        state.accept_tokens([ord("a") + 1, ord("b") + 1, stop])
        assert state.is_terminated()
        with pytest.raises(TokenRejected):
            state.accept_tokens([stop])
        state.rollback(2)
        assert not state.is_terminated()
        assert not state.is_accepting()
        with pytest.raises(BackendError):
            state.rollback(2)


def test_a_guide_writes_what_the_index_lists() -> None:
    grammar = OutlinesBackend(BYTES, MaskCache(0)).compile(Constraint.regex("(ab|ac|bc){2,5}[a-z]*"))
    index = outlines_core.Index.from_binary(grammar.dump()[1:])
    stops = set(BYTES.stop_token_ids)
    row = np.zeros(words(BYTES.padded_vocab_size), dtype=np.int32)
    matcher, state = grammar.matcher(), index.get_initial_state()
    for character in "abacbcbcxyzz":
        matcher.fill_bitmask(row)
        assert set(allowed_ids(row).tolist()) - stops == set(index.get_allowed_tokens(state)) - stops
        matcher.accept_tokens([ord(character) + 1])
        state = index.get_next_state(state, ord(character) + 1)


def test_the_way_to_a_state_is_no_longer_than_the_automaton() -> None:
    grammar = OutlinesBackend(BYTES).compile(Constraint.regex("[ab]*c"))
    state: int | None = grammar.start
    for character in "abbab" * 100:
        assert state is not None
        state = grammar.next_state(state, ord(character) + 1)
    assert state is not None
    assert len(grammar.path(state)) <= 1


def test_nothing_matches(backend: OutlinesBackend) -> None:
    with pytest.raises(InvalidConstraint):
        backend.compile(Constraint.json_schema({"type": "integer", "minimum": 1.2, "maximum": 1.8}))


def test_any_object_is_three_levels_deep(backend: OutlinesBackend) -> None:
    grammar = backend.compile(Constraint.json_object())
    for text in ("{}", '{"a": {"b": [1]}}', '{"a":[[null],{"b":"\\u001b"}]}'):
        assert fits(grammar, text), text
    for text in ("[]", '{"a":{"b":[{}]}}', '{"a":"\u001b"}'):
        assert not fits(grammar, text), text
    assert not fits(backend.compile(Constraint.json_object(whitespace="")), '{"a": 1}')


def test_auto_takes_other_backends_for_any_object_first() -> None:
    assert candidates("json_object")[:3] == ("llguidance", "xgrammar", "outlines")
