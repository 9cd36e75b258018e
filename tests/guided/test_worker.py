from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_grammar import STOP, ScriptedGrammar

from guided.bitmask import allowed_ids, words
from guided.errors import DeadEnd, TokenRejected, from_wire
from guided.messages import FillRow, OpenSequence, RowResult, RowStatus, StepRequest
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20)), b"<pad>"),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP, 21}),
    padded_vocab_size=40,
)
SENTENCES = [[1, 2, 3, 4], [1, 2, 5], [6, 6, 6]]


class Host:
    """A worker with one grammar, asked for one row at a time."""

    def __init__(self, grammar: ScriptedGrammar | None = None) -> None:
        self.worker = MaskWorker(VOCABULARY)
        self.worker.install("g", grammar or ScriptedGrammar(SENTENCES))
        self.bitmask = np.full((3, words(VOCABULARY.padded_vocab_size)), -1, np.int32)

    def fill(self, start: int, tokens: list[int], sequence: int = 7, opens: bool = False) -> RowResult:
        opening = [OpenSequence(sequence, "g")] if opens else []
        request = StepRequest(0, 0, [FillRow(sequence, 1, start, tokens)], opening)
        (result,) = self.worker.handle(request, self.bitmask)
        return result

    @property
    def allowed(self) -> list[int]:
        return allowed_ids(self.bitmask[1]).tolist()


def test_only_the_named_row_is_written() -> None:
    host = Host()
    assert host.fill(0, [], opens=True).status is RowStatus.READY
    assert host.allowed == [1, 6]
    assert (host.bitmask[[0, 2]] == -1).all()


def test_the_stop_token_is_allowed_exactly_where_the_constraint_is_satisfied() -> None:
    host = Host()
    host.fill(0, [1, 2, 5], opens=True)
    assert host.allowed == [STOP]
    host.fill(3, [STOP])
    assert host.allowed == [STOP]


def test_special_and_padding_tokens_are_never_allowed_whatever_the_backend_says() -> None:
    grammar = ScriptedGrammar([[1, token] for token in (2, 21, 25, 39)])
    host = Host(grammar)
    host.fill(0, [1], opens=True)
    assert host.allowed == [2]


def test_a_row_without_any_token_is_a_dead_end() -> None:
    host = Host(ScriptedGrammar([[1, 21]]))
    result = host.fill(0, [1], opens=True)
    assert result.status is RowStatus.FAILED
    assert isinstance(from_wire(result.error), DeadEnd)


class Panic(BaseException):
    """As pyo3's PanicException: no `Exception`."""


@pytest.mark.parametrize("failure", [ValueError("the library raised"), Panic("the library panicked")])
def test_a_library_that_raises_ends_its_row_and_no_other(failure: BaseException) -> None:
    host = Host(ScriptedGrammar(SENTENCES, fail_at=2, failure=failure))
    fills = [FillRow(1, 0, 0, [1, 2]), FillRow(2, 1, 0, [6])]
    results = list(
        host.worker.handle(StepRequest(0, 0, fills, [OpenSequence(1, "g"), OpenSequence(2, "g")]), host.bitmask)
    )
    assert [result.status for result in results] == [RowStatus.FAILED, RowStatus.READY]
    assert host.allowed == [6]
    assert host.worker.num_open == 1


def test_a_rejected_token_ends_the_sequence() -> None:
    host = Host()
    result = host.fill(0, [9], opens=True)
    assert isinstance(from_wire(result.error), TokenRejected)
    assert host.fill(1, [2]).status is RowStatus.NEEDS_HISTORY


def test_a_worker_that_lacks_the_state_asks_for_the_history_and_takes_it() -> None:
    host = Host()
    host.fill(0, [1], opens=True)
    assert host.fill(2, [3]).status is RowStatus.NEEDS_HISTORY
    assert host.fill(0, [1, 2, 3]).status is RowStatus.READY
    assert host.allowed == [4]


def test_an_unknown_grammar_is_a_failure_not_an_unmasked_row() -> None:
    host = Host()
    host.worker.uninstall("g")
    assert host.fill(0, [], opens=True).status is RowStatus.FAILED


def test_a_fork_goes_on_from_its_parent() -> None:
    host = Host()
    host.fill(0, [1, 2], opens=True)
    fork = StepRequest(0, 1, [FillRow(8, 1, 2, [5])], [OpenSequence(8, "g", parent=7)])
    (result,) = host.worker.handle(fork, host.bitmask)
    assert result.status is RowStatus.READY
    assert host.allowed == [STOP]
    host.fill(2, [3])
    assert host.allowed == [4]


def test_freed_matchers_are_gone() -> None:
    host = Host()
    host.fill(0, [], opens=True)
    list(host.worker.handle(StepRequest(0, 0, [], [], [7, 99]), host.bitmask))
    assert host.worker.num_open == 0


@settings(max_examples=200)
@given(st.data())
def test_any_order_of_repeated_lost_and_rewound_messages_gives_the_mask_of_the_position(data: st.DataObject) -> None:
    """Whatever the worker was told before, the mask is the one of the history that the message describes."""
    host = Host()
    host.fill(0, [], opens=True)
    for _ in range(data.draw(st.integers(1, 8))):
        sentence = data.draw(st.sampled_from(SENTENCES))
        history = sentence[: data.draw(st.integers(0, len(sentence)))]
        result = host.fill(0, history)
        assert result.status is RowStatus.READY
        known = {s[len(history)] for s in SENTENCES if s[: len(history)] == history and len(s) > len(history)}
        assert host.allowed == sorted(known | ({STOP} if history in SENTENCES else set()))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_results_carry_the_position_they_are_for(position: int) -> None:
    host = Host()
    result = host.fill(0, SENTENCES[0][:position], opens=True)
    assert (result.sequence, result.position, result.row) == (7, position, 1)
