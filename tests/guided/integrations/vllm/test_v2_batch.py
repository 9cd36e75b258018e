"""Slots of vLLM's V2 runner: reused without notice, with tokens that are copied step by step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided.integrations.vllm.masker import GuidedRequest, GuidedRow
from guided.integrations.vllm.v2_batch import V2Batch

SLOTS, LENGTH = 5, 128


class States:
    """vLLM's request states. The device is the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.all_token_ids = SimpleNamespace(gpu=torch.full((SLOTS, LENGTH), 77, dtype=torch.int32))
        self.total_len, self.prompt_len = (
            SimpleNamespace(gpu=lengths, np=lengths.numpy())
            for lengths in (torch.zeros(SLOTS, dtype=torch.int32) for _ in range(2))
        )

    def fill(self, slot: int, prompt: int, prior: int = 0) -> None:
        self.prompt_len.np[slot] = prompt
        self.set_length(slot, prompt + prior)

    def set_length(self, slot: int, length: int) -> None:
        """Token i of each slot is i."""
        self.all_token_ids.gpu[slot, :length] = torch.arange(length, dtype=torch.int32)
        self.total_len.np[slot] = length


@pytest.fixture
def states() -> States:
    return States()


def request(name: str) -> GuidedRequest:
    return GuidedRequest(name, None, None, 0, False)


def outputs(subject: V2Batch, slot: int) -> list[int]:
    (row,) = subject.rows([slot], [0], [])
    return list(row.token_ids)


A, B = request("a"), request("b")


def test_filling_a_slot_returns_the_previous_request(states: States) -> None:
    subject = V2Batch(states)
    assert subject.put(3, A) is None
    assert subject.put(3, B) is A
    assert subject.put(3, None) is B
    assert subject.put(3, None) is None
    assert list(subject) == []


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20), st.integers(0, 2))
def test_copied_tokens_are_added(steps: list[tuple[int, bool]], drafts: int) -> None:
    """Some steps add more tokens than are copied at once, and some copies are never read."""
    states = States()
    states.fill(0, 3)
    subject = V2Batch(states, drafts)
    subject.put(0, A)
    length = 3
    for count, read in steps:
        length += count
        states.set_length(0, length)
        subject.begin()
        if read:
            subject.read()
            assert outputs(subject, 0) == list(range(3, length))


def test_an_output_that_became_shorter_is_cut(states: States) -> None:
    states.fill(1, 2, 3)
    subject = V2Batch(states)
    subject.put(1, A)
    for length in (5, 3):
        states.set_length(1, length)
        subject.begin()
        subject.read()
        assert outputs(subject, 1) == list(range(2, length))


def test_a_request_that_is_absent_for_long_is_returned_once(states: States) -> None:
    subject = V2Batch(states)
    subject.put(0, A)
    subject.put(1, B)
    assert [subject.count_absent({0}, 2) for _ in range(4)] == [[], [B], [], []]
    assert subject.count_absent({1}, 2) == []
    assert [subject.count_absent({0}, 2) for _ in range(2)] == [[], [B]]


def test_rows_of_a_request_are_ordered_by_their_drafts(states: States) -> None:
    subject = V2Batch(states)
    subject.put(4, A)
    subject.put(2, B)
    rows = subject.rows([4, 4, 4, 9, 2, 2], [0, 1, 2, 0, 0, 1], [10, 11, 12, 13, 14, 15])
    assert rows == [
        GuidedRow(B, 4, [], 0),
        GuidedRow(B, 5, [15], 1),
        GuidedRow(A, 0, [], 0),
        GuidedRow(A, 1, [11], 1),
        GuidedRow(A, 2, [11, 12], 2),
    ]
