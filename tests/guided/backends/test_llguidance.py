"""Tests specific to llguidance: errors that it reports as masks, escapes in keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, accepts
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from numpy.typing import NDArray

from guided.backends.base import Matcher
from guided.backends.llguidance import adapter as llguidance_backend
from guided.backends.llguidance.adapter import LLGuidanceBackend
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary


def generate(matcher: Matcher, row: NDArray[np.int32], output: Sequence[int]) -> None:
    for token in output:
        matcher.fill_bitmask(row)
        matcher.accept_tokens([token])


def test_an_error_state_is_an_error_and_never_a_mask(vocabulary: Vocabulary) -> None:
    matcher = (
        LLGuidanceBackend(vocabulary)
        .compile(Constraint.regex("1|" + "😀{9999}" * 9))
        .matcher()
    )
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    with pytest.raises(UnsupportedConstraint, match="too ambiguous"):
        generate(matcher, row, vocabulary.encode("😀" * 3))
    # It stays in that state, whatever is asked of it.
    for ask in (
        lambda: matcher.fill_bitmask(row),
        lambda: matcher.accept_tokens([20]),
        lambda: matcher.rollback(1),
        lambda: matcher.is_accepting(),
        lambda: matcher.forced_tokens(),
        lambda: matcher.fork().fill_bitmask(row),
    ):
        with pytest.raises(UnsupportedConstraint):
            ask()


def test_a_thousand_optional_properties(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {f"a{number}": {"type": "integer"} for number in range(1000)},
    }
    matcher = (
        LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(schema)).matcher()
    )
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for token in vocabulary.encode('{"a3":5,"a77":1}'):
        matcher.fill_bitmask(row)
        matcher.accept_tokens([token])
    assert matcher.is_accepting()


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_bounds_of_sixteen_digits_are_exact(kind: str) -> None:
    schema = {"type": kind, "exclusiveMinimum": -(2**53), "maximum": -(2**53) + 1}
    grammar = LLGuidanceBackend(BYTES).compile(Constraint.json_schema(schema))
    assert [
        offset for offset in range(-3, 4) if accepts(grammar, str(-(2**53) + offset))
    ] == [1]


def test_sixty_levels_of_objects() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    nullable = schema
    for _ in range(59):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        nullable = {"type": ["object", "null"], "properties": {"a": nullable}}
    grammar = LLGuidanceBackend(BYTES).compile(Constraint.json_schema(schema))
    assert accepts(grammar, '{"a":' * 59 + "1" + "}" * 59)
    # two more levels for each
    with pytest.raises(UnsupportedConstraint, match="recursion limit"):
        LLGuidanceBackend(BYTES).compile(Constraint.json_schema(nullable))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            r'{"\u0061":"x"}',
        ),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            r'{"\u0061":"x"}',
        ),
        (
            {"type": "object", "properties": {"a\tb": {"type": "integer"}}},
            r'{"a\u0009b":"x"}',
        ),
        ({"items": {"properties": {"a": {"type": "integer"}}}}, r'[{"\u0061":"x"}]'),
    ],
    ids=json.dumps,
)
def test_no_key_slips_by_in_escapes(
    vocabulary: Vocabulary, schema: dict[str, object], text: str
) -> None:
    matcher = (
        LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(schema)).matcher()
    )
    with pytest.raises(TokenRejected):
        matcher.accept_tokens(vocabulary.encode(text))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: A\nA.2: "a"', "line 2, column 6: .*priority"),
        ("start: ?", "can't read the grammar: line 1, column 8"),
    ],
)
def test_refused_lark_says_where(
    vocabulary: Vocabulary, grammar: str, said: str
) -> None:
    with pytest.raises(InvalidConstraint, match=said):
        LLGuidanceBackend(vocabulary).compile(Constraint.grammar(grammar))


def test_whitespace_pattern() -> None:
    spaced = LLGuidanceBackend(BYTES).compile(
        Constraint.json_object(whitespace="[ ]{0,2}")
    )
    texts = ('{"a": 1}', '{"a":  1}', '{"a":   1}', '{"a":\n1}')
    assert [accepts(spaced, text) for text in texts] == [True, True, False, False]


def test_a_release_that_repeats_whitespace_bounds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llguidance_backend, "REPEATS_WHITESPACE", True)
    backend = LLGuidanceBackend(BYTES)
    with pytest.raises(UnsupportedConstraint, match="any number of matches"):
        backend.compile(Constraint.json_object(whitespace="[ ]{0,2}"))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array"}},
        "patternProperties": {"^x": {"type": "null"}},
    }
    grammars = [
        backend.compile(constraint)
        for constraint in (
            Constraint.json_object(),
            Constraint.json_schema(schema),
            Constraint.json_schema({}),
        )
    ]
    for text in (
        '{"a":[1,{"b":"c   d"}],"x":null}',
        '{"a": [1, {"b": []}]}',
        '{\n  "a": [\n    1\n  ],\n  "x": null\n}',
    ):
        assert all(accepts(grammar, text) for grammar in grammars), text
    for text in (
        '{"a":  []}',
        '{"a":\n\n[]}',
        '{"a":[1,' + "\n" + " " * 41 + "2]}",
        '{ "a":[]}',
        '{"a":[] }',
    ):
        assert not any(accepts(grammar, text) for grammar in grammars), text


FORCED = {
    "type": "object",
    "properties": {
        "x": {"const": {"identifier": "Zwölf Boxkämpfer 12.5", "descriptions": [[]]}}
    },
}
FORCED_TEXT = '{"x":{"identifier":"Zwölf Boxkämpfer 12.5","descriptions":[[]]}}'


def test_masks_on_forced_text_allow_what_the_tokenizer_writes(
    mistral_data: Path,
) -> None:
    """The tokenizer's own tokens of the text are allowed one after the other, and
    nothing else where it is forced."""
    path = mistral_data / "tekken_240911.json"
    vocabulary = Vocabulary.from_tekken(path)
    tokens = Tekkenizer.from_file(path).encode(FORCED_TEXT, bos=False, eos=False)
    assert vocabulary.decode(tokens).decode() == FORCED_TEXT
    matcher = (
        LLGuidanceBackend(vocabulary)
        .compile(Constraint.json_schema(FORCED, whitespace=""))
        .matcher()
    )
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    alone = 0
    for token in tokens:
        matcher.fill_bitmask(row)
        allowed = allowed_ids(row).tolist()
        assert token in allowed, vocabulary.token_bytes[token]
        alone += len(allowed) == 1
        matcher.accept_tokens([token])
    assert alone > len(tokens) // 2


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string", "not": {"enum": ["a", "abc"]}},
            ["", "ab", "abcd", "b", "aé"],
            ["a", "abc"],
        ),
        (
            {"type": "string", "not": {"pattern": "^(ab)*$"}},
            ["a", "aba", "\n"],
            ["", "ab", "abab"],
        ),
        (
            {"minProperties": 1, "properties": {"a": {}, "b": {}}, "type": "object"},
            [{"a": 1}, {"c": 1}],
            [{}],
        ),
        (
            {
                "properties": {"a": {"type": "array"}},
                "patternProperties": {".*": {"$ref": "#/$defs/t"}},
                "type": "object",
            }
            | {
                "$defs": {
                    "t": {"type": ["array", "null"], "items": {"$ref": "#/$defs/t"}}
                }
            },
            [{"a": [None]}, {"b": None}],
            [{"a": None}, {"a": [1]}, {"b": 1}],
        ),
        (
            {
                "$defs": {
                    "t": {
                        "type": "object",
                        "additionalProperties": {
                            "$ref": "#/$defs/t",
                            "minProperties": 1,
                        },
                    }
                }
            }
            | {"$ref": "#/$defs/t"},
            [{}],
            [{"a": {}}],
        ),
    ],
)
def test_rewritten_for_llguidance(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = LLGuidanceBackend(BYTES).compile(
        Constraint.json_schema(schema, strict_schema=True)
    )
    assert [
        value
        for value in (*good, *bad)
        if accepts(grammar, json.dumps(value, ensure_ascii=False))
    ] == good
