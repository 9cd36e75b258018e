"""Batch updates, against a model that only knows ids: following the updates gives the
batch."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.logits_processors import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    VllmConfig,
    process_dict_updates,
)
from engine.logits_processors.batch import IndexedBatch, PersistentBatch
from engine.logits_processors.interface import ModelConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.step.sequence import Sequence
from tests.engine.conftest import new_sequence

COUNT = 9
"""Sequences that there are; batches hold some of them in any order."""

histories = st.lists(
    st.lists(st.integers(0, COUNT - 1), unique=True), min_size=1, max_size=12
)


def sequences() -> list[Sequence]:
    return [
        new_sequence(SamplingParams(extra_args={"id": number}), [number + 1, 7])
        for number in range(COUNT)
    ]


def id_of(params: SamplingParams, *_: Any) -> int:
    assert params.extra_args is not None
    found: int = params.extra_args["id"]
    return found


def follow(batch: dict[int, int], update: BatchUpdate, *, added_first: bool) -> None:
    """The sequence at each index. One-way moves come first, from the highest non-empty
    to the lowest empty index, until the batch is contiguous. Then come swaps."""

    def add() -> None:
        for index, params, _, _ in update.added:
            batch[index] = id_of(params)

    if added_first:
        add()
    for index in update.removed:
        del batch[index]
    if not added_first:
        add()
    for first, second, direction in update.moved:
        if direction is MoveDirectionality.SWAP:
            assert batch.keys() == {*range(update.batch_size)}
            batch[first], batch[second] = batch[second], batch[first]
        else:
            assert (first, second) == (max(batch), min({*range(first)} - batch.keys()))
            batch[second] = batch.pop(first)


@given(histories, st.booleans())
def test_following_the_updates_gives_the_batch(
    history: list[list[int]], added_first: bool
) -> None:
    every, batch = sequences(), PersistentBatch()
    followed: dict[int, int] = {}
    largest, before = 0, list[int]()
    for rows in history:
        update = batch.update([every[number] for number in rows])
        assert (update is None) == (rows == before)
        if update is not None:
            largest = max(len(rows), len(before))
            assert update.batch_size == len(rows)
            assert not {*update.removed} & {index for index, *_ in update.added}, (
                "in whatever order they are taken"
            )
            touched = [
                *update.removed,
                *(add[0] for add in update.added),
                *(i for m in update.moved for i in m[:2]),
            ]
            assert all(0 <= index < largest for index in touched), (
                "an array of max_num_seqs is enough"
            )
            assert {id_of(params) for _, params, _, _ in update.added} == {*rows} - {
                *before
            }, "staying sequences are not added"
            follow(followed, update, added_first=added_first)
        assert followed == dict(enumerate(rows))
        before = rows


@given(histories)
def test_process_dict_updates_keeps_those_it_is_for(history: list[list[int]]) -> None:
    every, batch = sequences(), PersistentBatch()
    mine: dict[int, int] = {}
    for rows in history:
        update = batch.update([every[number] for number in rows])
        before = dict(mine)
        changed = process_dict_updates(
            mine,
            update,
            lambda params, *_: id_of(params) if id_of(params) % 2 else None,
        )
        assert mine == {row: number for row, number in enumerate(rows) if number % 2}
        assert changed or mine == before
    assert process_dict_updates(mine, None, lambda *_: 1) is False


class Revised(LogitsProcessor):
    """Keeps what it is told."""

    def __init__(self, *_: Any) -> None:
        self.held: dict[int, int] = {}
        self.rows: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def add_request(self, req_info: tuple[SamplingParams, int, int]) -> None:
        params, _, index = req_info
        assert index not in self.held
        self.held[index] = id_of(params)

    def remove_request(self, req_pdx: int) -> None:
        del self.held[req_pdx]

    def update_state(self, index_mapping: Any, token_ids: Any, seq_lens: Any) -> None:
        if index_mapping is not None:
            self.rows = index_mapping.tolist()
        self.tokens = {
            index: token_ids[index, : seq_lens[index]].tolist()
            for index in range(len(seq_lens))
        }


@given(
    st.lists(st.lists(st.integers(0, COUNT - 1), unique=True, max_size=4), min_size=1),
    st.integers(0, 2),
)
def test_indices_of_the_revised_model_show_their_tokens(
    history: list[list[int]], removed: int
) -> None:
    """Batches of up to four of nine sequences. Between them outputs grow, or their last
    tokens are replaced."""
    every = sequences()
    config = VllmConfig(ModelConfig(max_model_len=100), SchedulerConfig(max_num_seqs=4))
    processor = Revised()
    batch = IndexedBatch(processor, config)
    for step, rows in enumerate(history):
        batch.update([every[number] for number in rows])
        assert [processor.held[index] for index in processor.rows] == rows
        assert len(processor.held) == len(rows)
        for index, tokens in processor.tokens.items():
            expected = (
                every[processor.held[index]].span(0, 1 << 30)
                if index in processor.held
                else []
            )
            assert tokens == expected
        for number in rows:
            if every[number].num_output_tokens > removed > 0:
                every[number].rollback(removed)
            every[number].append(step + 10)
