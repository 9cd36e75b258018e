"""The worker's slots, beyond the contract of pools (`tests/pools`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_grammar import STOP, ScriptedGrammar

from guided.bitmask import allowed_ids, words
from guided.errors import BackendError, DeadEnd
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20)), b"<pad>"),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP, 21}),
    padded_vocab_size=40,
)
SENTENCES = [[1, 2, 3, 4], [1, 2, 5], [6, 6, 6]]
SLOT = 7


class Filled:
    """A worker with one grammar and one open slot, and the bitmask that it fills."""

    def __init__(self, grammar: ScriptedGrammar | None = None) -> None:
        self.worker = MaskWorker(VOCABULARY)
        self.grammar = grammar or ScriptedGrammar(SENTENCES)
        self.worker.open(SLOT, self.grammar)
        self.bitmask = np.full((3, words(VOCABULARY.padded_vocab_size)), -1, np.int32)

    def mask(self, *tokens: int) -> list[int]:
        """The allowed tokens after `tokens` more."""
        error = self.worker.fill(SLOT, tokens, self.bitmask[1])
        assert error is None, error
        allowed: list[int] = allowed_ids(self.bitmask[1]).tolist()
        return allowed


def test_the_stop_token_is_allowed_where_the_matcher_accepts() -> None:
    filled = Filled()
    assert filled.mask(1, 2, 5) == [STOP]
    assert filled.mask(STOP) == [STOP]


def test_special_and_padding_tokens_are_never_allowed() -> None:
    assert Filled(ScriptedGrammar([[1, token] for token in (2, 21, 25, 39)])).mask(
        1
    ) == [2]


def test_a_row_without_any_token_is_a_dead_end() -> None:
    filled = Filled(ScriptedGrammar([[1, 21]]))
    assert isinstance(filled.worker.fill(SLOT, [1], filled.bitmask[1]), DeadEnd)


class Panic(BaseException):
    """Like pyo3's PanicException: no `Exception`."""


@pytest.mark.parametrize(
    "failure", [ValueError("the library raised"), Panic("the library panicked")]
)
def test_a_library_that_raises_ends_its_slot_and_no_other(
    failure: BaseException,
) -> None:
    filled = Filled(ScriptedGrammar(SENTENCES, fail_at=2, failure=failure))
    filled.worker.open(1, filled.grammar)
    error = filled.worker.fill(1, [1, 2], filled.bitmask[0])
    assert isinstance(error, BackendError)
    assert filled.mask(6) == [6]
    assert filled.worker.fill(1, [], filled.bitmask[0]) is error


@settings(max_examples=60)
@given(st.data())
def test_after_any_edits_the_mask_is_that_of_the_output(data: st.DataObject) -> None:
    filled = Filled()
    known: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        sentence = data.draw(st.sampled_from(SENTENCES))
        output = sentence[: data.draw(st.integers(0, len(sentence)))]
        common = next(
            (i for i, (a, b) in enumerate(zip(known, output, strict=False)) if a != b),
            len(known),
        )
        start = data.draw(st.integers(0, min(common, len(known), len(output))))
        if start < len(known) or data.draw(st.booleans()):
            middle = data.draw(st.integers(start, len(output)))
            filled.worker.edit(SLOT, start, output[start:middle])
            known = output[:middle]
        if data.draw(st.booleans()):  # a second edit before the first one is applied
            start = data.draw(st.integers(0, len(known)))
            filled.worker.edit(SLOT, start, known[start:])
        assert filled.worker.length(SLOT) == len(known)
        allowed = filled.mask(*output[len(known) :])
        known = output
        following = {
            s[len(output)]
            for s in SENTENCES
            if s[: len(output)] == output and len(s) > len(output)
        }
        assert allowed == sorted(following | ({STOP} if output in SENTENCES else set()))


def ahead(filled: Filled, *tokens: int) -> tuple[list[int], list[int]]:
    """The allowed tokens after `tokens` more, and the forced ones."""
    run = np.full(8, 7, np.int32)
    allowed = filled.mask(*tokens)
    filled.worker.look_ahead(SLOT, filled.bitmask[1], run)
    return allowed, run[run >= 0].tolist()


def test_looking_ahead_finds_the_forced_tokens() -> None:
    filled = Filled()
    assert ahead(filled) == ([1, 6], [])
    assert ahead(filled, 6) == ([6], [6, 6, STOP])
    assert ahead(filled, 6) == ([6], [6, STOP])
    longer = Filled(ScriptedGrammar([[1] * 20]))
    assert ahead(longer) == ([1], [1] * 8)
    assert ahead(longer, 1, 1) == ([1], [1] * 8)


def test_an_error_ahead_is_none_yet() -> None:
    filled = Filled(ScriptedGrammar([[1, 2, 3, 4], [1, 2, 3, 5]], fail_at=2))
    assert ahead(filled) == ([1], [1, 2])
    error = filled.worker.fill(SLOT, [1, 2], filled.bitmask[1])
    assert isinstance(error, BackendError)
