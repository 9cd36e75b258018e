from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.block_manager import BlockManager
from engine.sampling_params import SamplingParams
from engine.step.scheduler import Batch, Scheduler
from engine.step.sequence import SequenceGroup, SequenceStatus
from tests.engine.conftest import new_sequence

BLOCK = 4


def group(name: str, tokens: int, n: int = 1, **fields: Any) -> SequenceGroup:
    params = SamplingParams(n=n, **fields)
    return SequenceGroup(
        name, [new_sequence(params, [1] * tokens, index) for index in range(n)], params
    )


def scheduler(
    num_blocks: int = 16, max_num_seqs: int = 8, max_num_batched_tokens: int = 100
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK, max_seqs=max_num_seqs, max_blocks=16)
    return Scheduler(
        blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )


def names(batch: Batch) -> tuple[list[str], list[str]]:
    prefills = [chunk.sequences[0].group.request_id for chunk in batch.prefills]
    return prefills, [sequence.group.request_id for sequence in batch.decodes]


def spans(batch: Batch) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in batch.prefills]


def sample(batch: Batch) -> None:
    """What the engine does after a step."""
    for sequence in [
        s for chunk in batch.prefills if chunk.is_last for s in chunk.sequences
    ] + batch.decodes:
        sequence.append(1)


def test_sequences_and_tokens_of_a_step_are_limited() -> None:
    it = scheduler(max_num_seqs=3, max_num_batched_tokens=12)
    for name, tokens, n in (("a", 6, 1), ("b", 9, 2), ("c", 1, 1)):
        it.add(group(name, tokens, n))
    batch = it.schedule()
    assert names(batch) == (["a", "b"], []), "c is over the sequences"
    assert spans(batch) == [(0, 6), (0, 6)]
    sample(batch)
    batch = it.schedule()
    assert (names(batch), spans(batch)) == ((["b"], ["a"]), [(6, 9)])
    sample(batch)
    assert [one.num_output_tokens for one in it.running] == [2, 1, 1]


def test_a_step_prefills_more_while_nothing_decodes() -> None:
    it = scheduler(max_num_batched_tokens=12)
    it.max_tokens_of_prefills = 30
    for name in "abc":
        it.add(group(name, 14))
    batch = it.schedule()
    assert (names(batch), spans(batch)) == (
        (["a", "b", "c"], []),
        [(0, 14), (0, 14), (0, 2)],
    )
    sample(batch)
    batch = it.schedule()
    assert (names(batch), spans(batch)) == ((["c"], ["a", "b"]), [(2, 12)])


def test_a_group_that_waits_for_its_grammar_keeps_its_place() -> None:
    it = scheduler(max_num_seqs=2)
    waiting, second, third = group("waiting", 4), group("second", 4), group("third", 4)
    waiting.set_status(SequenceStatus.WAITING_FOR_GRAMMAR)
    for one in (waiting, second, third):
        it.add(one)
    assert it.has_work
    batch = it.schedule()
    assert names(batch) == (["second", "third"], [])
    sample(batch)
    it.add(group("late", 4))
    waiting.set_status(SequenceStatus.WAITING)
    it.remove(second)
    assert names(it.schedule()) == (["waiting"], ["third"])


def test_the_newest_is_preempted_and_started_before_new_ones() -> None:
    it = scheduler(num_blocks=6)
    old, new = group("old", 8), group("new", 7)
    it.add(old)
    it.add(new)
    sample(it.schedule())
    it.add(group("newest", 1))
    while not it.prefills.preempted:
        batch = it.schedule()
        sample(batch)
    assert [sequence.group for sequence in it.prefills.preempted] == [new]
    assert it.num_preemptions == 1
    assert names(batch) == ([], ["old"]), "a step that preempts starts no new group"
    it.remove(old)
    batch = it.schedule()
    assert names(batch)[0] == ["new", "newest"]
    assert batch.prefills[0].end == new.sequences[0].length, (
        "prompt and output are prefilled again"
    )


def test_a_wide_group_starts_when_all_of_it_fits() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=4)
    first, wide = group("first", 4), group("wide", 4, n=4)
    for one in (first, wide, group("last", 4)):
        it.add(one)
    batch = it.schedule()
    assert names(batch) == (["first"], []), "nothing overtakes the group that waits"
    sample(batch)
    it.remove(first)
    assert names(it.schedule()) == (["wide"], [])
    assert len(it.running) == 4


def test_the_same_decodes_are_the_same_batch() -> None:
    it = scheduler()
    for name in "ab":
        it.add(group(name, 3))
    sample(it.schedule())
    first = it.schedule()
    sample(first)
    second = it.schedule()
    assert second is first
    sample(second)
    it.add(group("c", 3))
    sample(it.schedule())
    assert len(it.schedule().decodes) == 3
    it.remove(first.decodes[0].group)
    assert it.schedule() is not first


@given(st.data())
def test_all_sequences_end_and_give_their_blocks_back(data: st.DataObject) -> None:
    it = scheduler(
        num_blocks=data.draw(st.sampled_from([12, 24, 64])),
        max_num_seqs=6,
        max_num_batched_tokens=data.draw(st.integers(10, 40)),
    )
    waiting = []
    for index in range(data.draw(st.integers(1, 10))):
        tokens, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
        fits = n * it.blocks.blocks_for(tokens + 8) <= it.blocks.num_blocks
        search = n > 1 and fits and data.draw(st.booleans())
        waiting.append(
            group(f"{index}", tokens, n, use_beam_search=search, temperature=0)
        )
    lengths = {
        group: group.sequences[0].length + data.draw(st.integers(1, 8))
        for group in waiting
    }
    left = set(waiting)
    for _ in range(2_000):
        if waiting and (not left - set(waiting) or data.draw(st.booleans())):
            it.add(waiting.pop())
        batch = it.schedule()
        assert (
            len(batch.decodes)
            + sum(chunk.end - chunk.start for chunk in batch.prefills)
            <= it.max_num_batched_tokens
        )
        assert len({one.seq_id for one in batch.decodes}) == len(batch.decodes)
        sample(batch)
        for one in list(it.running):
            if one.length >= lengths[one.group]:
                one.finish(SequenceStatus.FINISHED_STOPPED)
        it.drop_finished()
        for ended in [
            group for group in left if all(one.is_finished() for one in group.sequences)
        ]:
            it.remove(ended)
            left.discard(ended)
        if not left:
            break
    assert not left
    assert it.blocks.num_free == it.blocks.num_blocks
