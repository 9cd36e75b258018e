"""Batch updates, against a model that only knows ids: following the updates gives the batch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer, TokenTexts
from engine.logits_processors import BatchUpdate, MoveDirectionality, process_dict_updates
from engine.logits_processors.batch import PersistentBatch, RequestIndices
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceStatus
from guided.vocabulary import Vocabulary

TEXTS = TokenTexts(Vocabulary((b"", b"a"), (0,), frozenset({0}), 2), tokenizer=[])
COUNT = 9
"""Sequences that there are; batches hold some of them in any order."""

histories = st.lists(st.lists(st.integers(0, COUNT - 1), unique=True), min_size=1, max_size=12)


def sequences(count: int = COUNT) -> list[Sequence]:
    return [
        Sequence(
            0,
            SamplingParams(extra_args={"id": number}),
            [number + 1, 7],
            max_length=100,
            stop_ids=frozenset(),
            seed=0,
            detokenizer=Detokenizer(TEXTS),
        )
        for number in range(count)
    ]


def id_of(params: SamplingParams, *_: Any) -> int:
    assert params.extra_args is not None
    found: int = params.extra_args["id"]
    return found


def follow(batch: dict[int, int], update: BatchUpdate, *, added_first: bool) -> None:
    """The sequence at each index. One-way moves come first, from the highest non-empty to the lowest empty index, until
    the batch is contiguous. Then come swaps."""

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
def test_following_the_updates_gives_the_batch(history: list[list[int]], added_first: bool) -> None:
    every, batch = sequences(), PersistentBatch()
    followed: dict[int, int] = {}
    largest, before = 0, list[int]()
    for rows in history:
        update = batch.update([every[number] for number in rows])
        assert (update is None) == (rows == before)
        if update is not None:
            largest = max(len(rows), len(before))
            assert update.batch_size == len(rows)
            assert not {*update.removed} & {index for index, *_ in update.added}, "in whatever order they are taken"
            touched = [*update.removed, *(add[0] for add in update.added), *(i for m in update.moved for i in m[:2])]
            assert all(0 <= index < largest for index in touched), "an array of max_num_seqs is enough"
            assert {id_of(params) for _, params, _, _ in update.added} == {*rows} - {*before}, (
                "staying sequences are not added"
            )
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
        changed = process_dict_updates(mine, update, lambda params, *_: id_of(params) if id_of(params) % 2 else None)
        assert mine == {row: number for row, number in enumerate(rows) if number % 2}
        assert changed or mine == before
    assert process_dict_updates(mine, None, lambda *_: 1) is False


events = st.lists(
    st.tuples(st.lists(st.integers(0, COUNT - 1), unique=True, max_size=4), st.sampled_from(SequenceStatus)), min_size=1
)


@given(events)
def test_slots_are_a_sequence_s_own_and_show_its_tokens(history: list[tuple[list[int], SequenceStatus]]) -> None:
    """Batches of up to four of nine in four slots; between batches a sequence changes its status."""
    every, slots = sequences(), RequestIndices(4, 100)
    places: dict[int, int] = {}
    for rows, status in history:
        batch = [every[number] for number in rows]
        for one in batch:
            one.status = SequenceStatus.RUNNING
        others = [one for one in every if one.status is SequenceStatus.RUNNING and one not in batch]
        for one in others[4 - len(batch) :]:
            one.status = SequenceStatus.WAITING  # as the scheduler: at most four run
        mapping = slots.assign(batch).tolist()
        assert len({*mapping}) == len(mapping)
        for number, index in zip(rows, mapping, strict=True):
            one = every[number]
            assert slots.holders[index] is one
            assert slots.token_ids[index, : slots.seq_lens[index]].tolist() == one.data.token_ids
        held = {number: index for index, one in slots.holders.items() for number in [every.index(one)]}
        kept = {number for number in places if every[number].status is SequenceStatus.RUNNING}
        assert all(held.get(number) == places[number] for number in kept), "a running sequence keeps its slot"
        places = held
        for place, one in enumerate(batch):
            one.append(place + 10)
        if batch:
            batch[0].status = status
