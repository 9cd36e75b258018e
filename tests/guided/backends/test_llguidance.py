"""Tests specific to llguidance: errors that it reports as masks, escapes in keys."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor

from guided.backends import Backends
from guided.backends import llguidance as llguidance_backend
from guided.backends.base import Matcher
from guided.backends.llguidance import LLGuidanceBackend
from guided.bitmask import allowed_ids, words
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

AMBIGUOUS = Constraint.grammar('start: s\ns: "a" | "b" | s s | s s s')
"""The cost of its masks grows with every character, up to the limit."""

LIMITS = llguidance.LLParserLimits(step_max_items=400)


def generate(matcher: Matcher, row: NDArray[np.int32], tokens: Sequence[int]) -> None:
    for token in tokens:
        matcher.fill_bitmask(row)
        matcher.accept_tokens([token])


def fill_until_failure(matcher: Matcher, vocabulary: Vocabulary) -> int:
    """Compute masks until one fails. No mask before may be the end-of-sequence-only mask of an error state."""
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    tokens = vocabulary.encode("ab" * 200)
    for position, token in enumerate(tokens):
        matcher.fill_bitmask(row)
        assert len(allowed_ids(row)) > 1, position
        matcher.accept_tokens([token])
    raise AssertionError("it did not fail")


def test_an_error_state_is_an_error_and_never_a_mask(vocabulary: Vocabulary) -> None:
    matcher = LLGuidanceBackend(vocabulary, LIMITS).compile(AMBIGUOUS).matcher()
    with pytest.raises(UnsupportedConstraint, match="Too many items"):
        fill_until_failure(matcher, vocabulary)
    # It stays in that state, whatever is asked of it.
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
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


def test_a_limit_that_a_copy_has_exceeded_is_the_reason_for_a_rejected_token(vocabulary: Vocabulary) -> None:
    """Copies share the lexer, and so its limits: a search for a completion uses them up too."""
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.regex("1|" + "😀{9999}" * 9)).matcher()
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    copy = matcher.fork()
    with pytest.raises(UnsupportedConstraint, match="too ambiguous"):
        generate(copy, row, vocabulary.encode("😀" * 3))
    with pytest.raises(UnsupportedConstraint, match="too ambiguous"):
        matcher.accept_tokens(vocabulary.encode("1"))


def test_a_token_is_rejected_also_where_none_is_allowed(vocabulary: Vocabulary) -> None:
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.grammar('start: "a" x | "c"\nx: x "b"')).matcher()
    with pytest.raises(TokenRejected):
        matcher.accept_tokens(vocabulary.encode("a") + vocabulary.encode("b"))


def test_an_error_state_fails_the_row_and_no_other(vocabulary: Vocabulary) -> None:
    worker = MaskWorker(vocabulary)
    backend = LLGuidanceBackend(vocabulary, LIMITS)
    worker.install("expensive", backend.compile(AMBIGUOUS))
    worker.install("plain", backend.compile(Constraint.regex("[ab]+")))
    bitmask = np.zeros((2, words(vocabulary.padded_vocab_size)), dtype=np.int32)
    tokens = vocabulary.encode("ab" * 200)
    worker.open(0, "expensive")
    worker.open(1, "plain")
    for step in range(len(tokens)):
        new = tokens[max(step - 1, 0) : step]
        error = worker.fill(0, new, bitmask[0])
        assert worker.fill(1, new, bitmask[1]) is None
        if error is not None:
            assert error.code == UnsupportedConstraint.code
            return
        assert len(allowed_ids(bitmask[0])) > 1
    raise AssertionError("it did not fail")


def test_a_thousand_optional_properties(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"} for number in range(1000)}}
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(schema)).matcher()
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for token in vocabulary.encode('{"a3":5,"a77":1}'):
        matcher.fill_bitmask(row)
        matcher.accept_tokens([token])
    assert matcher.is_accepting()


def test_limits_while_compiling(vocabulary: Vocabulary) -> None:
    backend = LLGuidanceBackend(vocabulary, llguidance.LLParserLimits(max_grammar_size=20))
    with pytest.raises(UnsupportedConstraint, match="grammar"):
        backend.compile(Constraint.json_schema({"type": "object", "properties": {str(i): {} for i in range(50)}}))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"type": "object", "properties": {"a\tb": {"type": "integer"}}}, r'{"a\u0009b":"x"}'),
        ({"items": {"properties": {"a": {"type": "integer"}}}}, r'[{"\u0061":"x"}]'),
    ],
    ids=json.dumps,
)
def test_no_key_slips_by_in_escapes(vocabulary: Vocabulary, schema: dict[str, object], text: str) -> None:
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(schema)).matcher()
    with pytest.raises(TokenRejected):
        matcher.accept_tokens(vocabulary.encode(text))


@pytest.mark.parametrize(
    ("bounds", "inside", "rounded"),
    [
        ({"minimum": 0, "exclusiveMaximum": 2147483651}, "2147483650.99999", "2147483650.99999999"),
        ({"exclusiveMinimum": -2147483651}, "-2147483650.99999", "-2147483650.99999999"),
        ({"exclusiveMaximum": 10**12}, "999999999999.9", "999999999999.99999"),
        ({"exclusiveMinimum": 1 - 2**53, "maximum": 2 - 2**53}, str(2 - 2**53), f"{2 - 2**53}.9"),
    ],
)
def test_no_number_is_rounded_to_an_excluded_bound(
    vocabulary: Vocabulary, bounds: dict[str, float], inside: str, rounded: str
) -> None:
    backend = Backends(vocabulary)["llguidance"]
    for text, fits in ((inside, True), (rounded, False)):
        matcher = backend.compile(Constraint.json_schema({"type": "number", **bounds})).matcher()
        try:
            matcher.accept_tokens(vocabulary.encode(text))
            assert matcher.is_accepting() is fits, text
        except TokenRejected:
            assert not fits, text


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, False)])
def test_labels_of_mail_addresses_have_63_characters(vocabulary: Vocabulary, length: int, fits: bool) -> None:
    schema = {"type": "string", "format": "email"}
    matcher = Backends(vocabulary)["llguidance"].compile(Constraint.json_schema(schema)).matcher()
    tokens = vocabulary.encode(f'"a@{"b" * length}.org"')
    if fits:
        matcher.accept_tokens(tokens)
        assert matcher.is_accepting()
    else:
        with pytest.raises(TokenRejected):
            matcher.accept_tokens(tokens)


@pytest.mark.parametrize(
    "schema",
    [{"enum": [1, {"a": 123456789.12345679}]}, {"const": 1e-30}, {"type": "number", "maximum": 0.12345678912345679}],
)
def test_a_number_that_it_would_read_as_another_double_is_refused(
    vocabulary: Vocabulary, schema: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedConstraint, match=r"digits|not a double"):
        Backends(vocabulary)["llguidance"].compile(Constraint.json_schema(schema, strict_schema=True))


def test_a_multiple_with_more_states_than_the_lexer_has_is_refused(vocabulary: Vocabulary) -> None:
    schema = {"type": "number", "maximum": 10**7, "multipleOf": 9973}
    with pytest.raises(UnsupportedConstraint, match="multipleOf"):
        Backends(vocabulary)["llguidance"].compile(Constraint.json_schema(schema, strict_schema=True))
    Backends(vocabulary)["llguidance"].compile(Constraint.json_schema({**schema, "maximum": 0}))


@pytest.mark.parametrize(
    ("multiple", "texts", "others"),
    [(0.25, ["0.25", "63.5", "76", "75.0", "-1.75"], ["0.3", "1.20"]), (1.5, ["3", "4.5"], ["4", "4.0"])],
)
def test_a_multiple_may_have_fewer_decimals(
    vocabulary: Vocabulary, multiple: float, texts: list[str], others: list[str]
) -> None:
    constraint = Constraint.json_schema({"type": "number", "multipleOf": multiple}, strict_schema=True)
    grammar = Backends(vocabulary)["llguidance"].compile(constraint)
    for text in (*texts, *others):
        matcher = grammar.matcher()
        ended = False
        with contextlib.suppress(TokenRejected):
            matcher.accept_tokens(vocabulary.encode(text))
            ended = matcher.is_accepting()
        assert ended is (text in texts), text


def test_a_schema_cannot_switch_enforcement_off(vocabulary: Vocabulary) -> None:
    schema = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(UnsupportedConstraint, match="uniqueItems"):
        LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(schema, strict_schema=True))


def test_what_nothing_satisfies_is_invalid(vocabulary: Vocabulary) -> None:
    backend = LLGuidanceBackend(vocabulary)
    for constraint in (
        Constraint("json_schema", "false"),
        Constraint("json_schema", '{"type":"object","required":["b"],"properties":{"b":false}}'),
    ):
        with pytest.raises(InvalidConstraint) as caught:
            backend.compile(constraint)
        assert not isinstance(caught.value, UnsupportedConstraint)
    backend.compile(Constraint("json_schema", "true"))


def test_a_listed_double_that_would_be_written_as_another_integer_is_refused(vocabulary: Vocabulary) -> None:
    backend = LLGuidanceBackend(vocabulary)
    with pytest.raises(UnsupportedConstraint, match=r"digits|not a double"):
        backend.compile(Constraint.json_schema({"enum": [1.5, 2.0**60]}, strict_schema=True))
    backend.compile(Constraint.json_schema({"enum": [1e18]}))


@pytest.mark.parametrize("grammar", ["start: start", "start: b\nb: b"])
def test_a_grammar_without_a_sentence_is_invalid(vocabulary: Vocabulary, grammar: str) -> None:
    with pytest.raises(InvalidConstraint, match="no output satisfies"):
        compile_with(Backends(vocabulary), Constraint.grammar(grammar), "llguidance")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: A\nA.2: "a"', "priority out: .*: line 2, column 6"),
        ('start: sep{"a"}\nsep{x}: x', "template's rule out .*: line 2, column"),
        ('%declare B\nstart: "a"', "define the terminal .*: line 1, column 1"),
        ("start: ?", "malformed: line 1, column 8"),
    ],
)
def test_refused_lark_says_where_and_what_works(vocabulary: Vocabulary, grammar: str, said: str) -> None:
    with pytest.raises(InvalidConstraint, match=said):
        LLGuidanceBackend(vocabulary).compile(Constraint.grammar(grammar))


def test_whitespace_pattern(vocabulary: Vocabulary) -> None:
    spaced = LLGuidanceBackend(vocabulary).compile(Constraint.json_object(whitespace="[ ]{0,2}"))
    for text, good in (('{"a": 1}', True), ('{"a":  1}', True), ('{"a":   1}', False), ('{"a":\n1}', False)):
        matcher = spaced.matcher()
        if good:
            matcher.accept_tokens(vocabulary.encode(text))
            assert matcher.is_accepting()
        else:
            with pytest.raises(TokenRejected):
                matcher.accept_tokens(vocabulary.encode(text))


def test_a_release_that_repeats_the_whitespace_pattern_refuses_one(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "REPEATS_WHITESPACE", True)
    backend = LLGuidanceBackend(vocabulary)
    with pytest.raises(UnsupportedConstraint, match="any number of matches"):
        backend.compile(Constraint.json_object(whitespace="[ ]{0,2}"))
    backend.compile(Constraint.json_object(whitespace=""))


def test_there_blanks_stand_behind_commas_and_colons_and_are_bounded(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "REPEATS_WHITESPACE", True)
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "patternProperties": {"^x": {"type": "null"}}}
    grammars = [
        LLGuidanceBackend(vocabulary).compile(constraint)
        for constraint in (Constraint.json_object(), Constraint.json_schema(schema), Constraint.json_schema({}))
    ]
    for text in ('{"a":[1,{"b":"c   d"}],"x":null}', '{"a": [1, {"b": []}]}', '{"a":\n\t\t[1,\r\n 2],\n  "x": null}'):
        for grammar in grammars:
            matcher = grammar.matcher()
            matcher.accept_tokens(vocabulary.encode(text))
            assert matcher.is_accepting()
    for text in ('{"a":  []}', '{"a":\n\n[]}', '{"a":[1,' + "\n" + " " * 41 + "2]}", '{ "a":[]}', '{"a":[] }'):
        for grammar in grammars:
            with pytest.raises(TokenRejected):
                grammar.matcher().accept_tokens(vocabulary.encode(text))


def test_ten_thousand_choices(vocabulary: Vocabulary) -> None:
    choices = [f"option number {index} (of many)" for index in range(10_000)]
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.choice(choices)).matcher()
    matcher.accept_tokens(vocabulary.encode(choices[4242]))
    assert matcher.is_accepting()


FORCED = {
    "type": "object",
    "properties": {"x": {"const": {"identifier": "Zwölf Boxkämpfer 12.5", "descriptions": [[]]}}},
}
FORCED_TEXT = '{"x":{"identifier":"Zwölf Boxkämpfer 12.5","descriptions":[[]]}}'


@pytest.mark.parametrize("family", ["tekken", "sentencepiece"])
def test_masks_on_forced_text_allow_what_the_tokenizer_writes(mistral_data: Path, family: str) -> None:
    """The tokenizer's own tokens of the text are allowed one after the other, and nothing else where it is forced."""
    if family == "tekken":
        path = mistral_data / "tekken_240911.json"
        vocabulary = Vocabulary.from_tekken(path)
        tokens = Tekkenizer.from_file(path).encode(FORCED_TEXT, bos=False, eos=False)
    else:
        path = mistral_data / "mistral_instruct_tokenizer_240323.model.v3"
        vocabulary, model = Vocabulary.from_sentencepiece(path), SentencePieceProcessor(model_file=str(path))
        tokens = model.Encode("\n" + FORCED_TEXT)[len(model.Encode("\n")) :]
    assert vocabulary.decode(tokens).decode() == FORCED_TEXT
    matcher = LLGuidanceBackend(vocabulary).compile(Constraint.json_schema(FORCED, whitespace="")).matcher()
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    alone = 0
    for token in tokens:
        matcher.fill_bitmask(row)
        allowed = allowed_ids(row).tolist()
        assert token in allowed, vocabulary.token_bytes[token]
        alone += len(allowed) == 1
        matcher.accept_tokens([token])
    assert alone > len(tokens) // 2
