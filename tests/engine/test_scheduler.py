from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.beam_search import BeamSearch
from engine.block_manager import BlockManager
from engine.detokenizer import Detokenizer, TokenTexts
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledBatch, Scheduler
from engine.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.vocabulary import Vocabulary

BLOCK = 4
TEXTS = TokenTexts(Vocabulary((b"", b"a"), (0,), frozenset({0}), 2), tokenizer=[])


def group(name: str, tokens: int, n: int = 1) -> SequenceGroup:
    params = SamplingParams(n=n)
    sequences = [
        Sequence(
            index, params, [1] * tokens, max_length=64, stop_ids=frozenset(), seed=0, detokenizer=Detokenizer(TEXTS)
        )
        for index in range(n)
    ]
    return SequenceGroup(name, sequences, params)


def scheduler(
    num_blocks: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    step_tokens: int = 100,
    context_tokens: int = 1000,
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK, max_seqs=max_num_seqs, max_blocks=16)
    return Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        step_tokens=step_tokens,
        context_tokens=context_tokens,
    )


def names(batch: ScheduledBatch) -> tuple[list[str], list[str]]:
    return (
        [chunk.sequences[0].group.request_id for chunk in batch.prefills],
        [sequence.group.request_id for sequence in batch.decodes],
    )


def spans(batch: ScheduledBatch) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in batch.prefills]


def sample(batch: ScheduledBatch) -> None:
    """What the engine does after a step."""
    for sequence in [s for chunk in batch.prefills if chunk.is_last for s in chunk.sequences] + batch.decodes:
        sequence.append(1)


def test_prompts_first_then_one_token_each_and_newcomers_join() -> None:
    it = scheduler()
    it.add(group("a", 5))
    it.add(group("b", 3))
    batch = it.schedule()
    assert names(batch) == (["a", "b"], [])
    sample(batch)
    it.add(group("c", 2))
    batch = it.schedule()
    assert names(batch) == (["c"], ["b", "a"]), "those that decode are sorted by length"
    assert all(s.status is SequenceStatus.RUNNING for s in it.running)


def test_sequences_and_tokens_of_a_step_are_limited_and_the_order_is_kept() -> None:
    it = scheduler(max_num_seqs=2, max_num_batched_tokens=12)
    for name, tokens in (("a", 6), ("b", 9), ("c", 1)):
        it.add(group(name, tokens))
    batch = it.schedule()
    assert names(batch) == (["a", "b"], []), "c is over the sequences"
    assert spans(batch) == [(0, 6), (0, 3)]
    sample(batch)
    batch = it.schedule()
    assert names(batch) == (["b"], ["a"])
    assert spans(batch) == [(3, 9)]


def test_a_long_prompt_is_prefilled_in_chunks_and_delays_neither_tokens_nor_short_prompts() -> None:
    it = scheduler(num_blocks=64, max_num_batched_tokens=20)
    it.add(group("running", 4))
    sample(it.schedule())
    it.add(group("long", 50, n=2))
    batch = it.schedule()
    sample(batch)
    assert (names(batch), spans(batch)) == ((["long"], ["running"]), [(0, 19)])
    it.add(group("short", 5))
    batch = it.schedule()
    sample(batch)
    assert (names(batch), spans(batch)) == ((["long", "short"], ["running"]), [(19, 29), (0, 5)])
    sampled = []
    while not sampled:
        batch = it.schedule()
        sampled = [one for chunk in batch.prefills if chunk.is_last for one in chunk.sequences]
        sample(batch)
    assert [one.group.request_id for one in sampled] == ["long", "long"]
    assert [one.num_output_tokens for one in it.running] == [5, 1, 1, 3]


def test_a_preempted_part_of_a_prefill_starts_again() -> None:
    it = scheduler(num_blocks=64, max_num_batched_tokens=20)
    it.add(group("long", 50, n=2))
    it.schedule()
    second = it.running.pop()
    it.preempt(second)
    batch = it.schedule()
    assert spans(batch) == [(20, 30), (0, 10)]
    for _ in range(8):
        sample(batch)
        batch = it.schedule()
    assert all(one.num_output_tokens > 1 for one in it.running)
    it.remove(second.group)
    assert it.blocks.num_free == it.blocks.num_blocks


def test_a_group_that_waits_for_its_grammar_is_skipped_and_keeps_its_turn() -> None:
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


def test_alone_and_waiting_for_a_grammar_is_no_work() -> None:
    it = scheduler()
    waiting = group("waiting", 4)
    waiting.set_status(SequenceStatus.WAITING_FOR_GRAMMAR)
    it.add(waiting)
    assert not it.has_work
    assert it.schedule().is_empty


def run_out_of_blocks() -> tuple[Scheduler, list[SequenceGroup]]:
    it = scheduler(num_blocks=6)
    groups = [group("old", 8), group("new", 7)]
    for one in groups:
        it.add(one)
    sample(it.schedule())
    return it, groups


def test_the_newest_is_preempted_and_comes_back_before_new_groups() -> None:
    it, (old, new) = run_out_of_blocks()
    it.add(group("newest", 1))
    preempted_at: int | None = None
    for step in range(12):
        batch = it.schedule()
        sample(batch)
        if it.preempted:
            preempted_at = step
            break
    assert preempted_at is not None
    assert [sequence.group for sequence in it.preempted] == [new]
    assert it.num_preemptions == 1
    assert names(batch) == ([], ["old"]), "a step that preempts starts no new group"
    it.remove(old)
    batch = it.schedule()
    assert names(batch)[0] == ["new", "newest"]
    assert batch.prefills[0].end == new.sequences[0].length, "prompt and output are prefilled again"


def test_every_order_of_ends_gives_all_blocks_back() -> None:
    it, groups = run_out_of_blocks()
    for _ in range(6):
        sample(it.schedule())
    for one in reversed(groups):
        it.remove(one)
    assert it.blocks.num_free == it.blocks.num_blocks
    assert not it.has_work


def test_a_group_of_n_is_prefilled_once_and_copies_what_it_shares() -> None:
    it = scheduler()
    it.add(group("many", 6, n=3))
    batch = it.schedule()
    assert len(batch.prefills) == 1
    assert len(batch.prefills[0].sequences) == 3
    assert it.blocks.num_free == 14
    sample(batch)
    batch = it.schedule()
    assert len(batch.decodes) == 3
    assert len(batch.copies) == 2
    assert len({source for source, _ in batch.copies}) == 1


def test_a_finished_sequence_leaves_its_group_running() -> None:
    it = scheduler()
    many = group("many", 6, n=2)
    it.add(many)
    sample(it.schedule())
    many.sequences[0].finish(SequenceStatus.FINISHED_STOPPED)
    it.drop_finished()
    assert it.schedule().decodes == [many.sequences[1]]


def of(client: str, name: str, tokens: int = 4, n: int = 1) -> SequenceGroup:
    one = group(name, tokens, n)
    one.client = client
    return one


def clients(it: Scheduler) -> list[str]:
    return sorted(sequence.group.client for sequence in it.running)


def test_clients_take_turns_and_each_ones_order_is_kept() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=4)
    for index in range(6):
        it.add(of("flood", f"f{index}"))
    for name in "ab":
        it.add(of("other", name))
    assert names(it.schedule())[0] == ["f0", "a", "f1", "b"]


def test_a_newcomer_replaces_the_newest_of_a_client_that_runs_more() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=4)
    for index in range(6):
        it.add(of("flood", f"f{index}"))
    sample(it.schedule())
    assert clients(it) == ["flood"] * 4
    for name in "abc":
        it.add(of("other", name))
    for _ in range(6):
        sample(it.schedule())
    assert clients(it) == ["flood", "flood", "other", "other"], "equal shares, and nothing goes back and forth"
    assert it.num_preemptions == 2
    assert [sequence.group.request_id for sequence in it.preempted] == ["f2", "f3"]


def test_a_wide_group_gives_way_to_another_client() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=4)
    wide = of("flood", "wide", n=4)
    it.add(wide)
    sample(it.schedule())
    single = of("other", "single")
    it.add(single)
    batch = it.schedule()
    assert (names(batch)[0], len(batch.decodes)) == (["single"], 3)
    sample(batch)
    it.remove(single)
    assert names(it.schedule())[0] == ["wide"]
    assert len(it.running) == 4
    it.remove(wide)
    assert it.blocks.num_free == it.blocks.num_blocks


def test_a_wide_group_starts_beside_ever_new_requests_of_another_client() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=4)
    it.add(of("other", "0"))
    sample(it.schedule())
    wide = of("wide", "wide", n=4, tokens=9)
    it.add(wide)
    for index in range(1, 20):
        it.add(of("other", f"{index}"))
        sample(it.schedule())
        it.remove(next(one.group for one in it.running if one.group is not wide))
        if index == 10:
            assert [one.num_output_tokens > 0 for one in wide.sequences] == [True, True, True, False]
            for one in wide.sequences[:2]:
                one.finish(SequenceStatus.FINISHED_STOPPED)
            it.drop_finished()
    assert wide.sequences[3].num_output_tokens > 0
    for each in {one.group for one in it.running}:
        it.remove(each)
    assert it.blocks.num_free == it.blocks.num_blocks


def test_long_sequences_give_their_blocks_to_another_client() -> None:
    it = scheduler(num_blocks=8)
    for index in range(2):
        it.add(of("flood", f"f{index}", tokens=13))
    sample(it.schedule())
    it.add(of("other", "a", tokens=9))
    assert names(it.schedule())[0] == ["a"]
    assert clients(it) == ["flood", "other"]


def test_one_client_alone_is_not_preempted_for_its_own_groups() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=2)
    for index in range(4):
        it.add(of("only", f"{index}"))
    for _ in range(4):
        sample(it.schedule())
    assert it.num_preemptions == 0


def rows(batch: ScheduledBatch) -> Counter[str]:
    return Counter(sequence.group.client for sequence in batch.decodes)


def test_a_client_with_few_sequences_is_not_slowed_down_by_one_with_many() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=16, step_tokens=4)
    for index in range(12):
        it.add(of("flood", f"f{index}", tokens=3))
    sample(it.schedule())
    batch = it.schedule()
    assert rows(batch) == {"flood": 12}, "alone, a client is not limited"
    sample(batch)
    single = of("other", "single", tokens=2)
    it.add(single)
    batch = it.schedule()
    assert names(batch)[0] == ["single"]
    sample(batch)
    batch = it.schedule()
    assert rows(batch) == {"flood": 7, "other": 1}, "two steps of one sequence each: 2 * (4 + 2) - 4 tokens"
    assert [one.group.request_id for one in batch.decodes if one.group is not single] == [f"f{n}" for n in range(7)]
    sample(batch)
    it.remove(single)
    assert rows(it.schedule()) == {"flood": 12}, "the others have kept their blocks"
    assert it.num_preemptions == 0


def test_long_sequences_count_for_more() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=16, step_tokens=4, context_tokens=20)
    for index in range(12):
        it.add(of("flood", f"f{index}", tokens=40))
    for _ in range(12):
        batch = it.schedule()
        sample(batch)
    assert rows(batch) == {"flood": 12}
    it.add(of("other", "single", tokens=2))
    sample(it.schedule())
    assert rows(it.schedule()) == {"flood": 3, "other": 1}, "each costs three tokens of seven"
    assert it.num_preemptions == 0


def test_as_many_clients_as_sequences_are_not_limited() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=16, step_tokens=4)
    for index in range(16):
        it.add(of(f"client {index}", f"{index}", tokens=3))
    for _ in range(2):
        sample(it.schedule())
    assert len(it.schedule().decodes) == 16


def test_beams_run_together_beyond_their_clients_share() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=16, step_tokens=0)
    beams = of("flood", "beams", n=6)
    beams.beams = BeamSearch(SamplingParams(use_beam_search=True, best_of=6, temperature=0), 8, frozenset())
    it.add(beams)
    sample(it.schedule())
    it.add(of("other", "single", tokens=2))
    sample(it.schedule())
    assert rows(it.schedule()) == {"flood": 6, "other": 1}


def test_a_short_prompt_does_not_wait_for_another_clients_prefills() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=16, step_tokens=0)
    for index in range(8):
        it.add(of("flood", f"f{index}", tokens=30))
    it.add(of("other", "before"))
    for _ in range(3):
        sample(it.schedule())
    it.add(of("other", "short"))
    assert "short" in [name for _ in range(4) for name in names(it.schedule())[0]]


def test_long_prompts_do_not_fill_the_steps_of_another_client() -> None:
    it = scheduler(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, step_tokens=10)
    it.add(of("other", "decodes"))
    sample(it.schedule())
    for index in range(3):
        it.add(of("flood", f"f{index}", tokens=60))
    for _ in range(6):
        batch = it.schedule()
        assert len(batch.decodes) + sum(chunk.end - chunk.start for chunk in batch.prefills) <= 14
        sample(batch)


def test_a_prompt_is_not_behind_the_prefills_that_another_client_has_begun() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=16, step_tokens=6)
    for index in range(5):
        it.add(of("flood", f"f{index}", tokens=60))
    it.add(of("other", "first"))
    for _ in range(4):
        sample(it.schedule())
    it.add(of("other", "prompt", tokens=24))
    for _ in range(8):
        batch = it.schedule()
        sample(batch)
    assert "prompt" in names(batch)[1]


def test_beams_that_fill_the_engine_are_not_started_again_before_the_client_that_they_were_preempted_for() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=8, step_tokens=4)
    beams = of("flood", "beams", tokens=12, n=8)
    beams.beams = BeamSearch(SamplingParams(use_beam_search=True, best_of=8, temperature=0), 8, frozenset())
    it.add(beams)
    for _ in range(3):
        sample(it.schedule())
    single = of("other", "single", tokens=6)
    it.add(single)
    for _ in range(6):
        sample(it.schedule())
    assert single.sequences[0].num_output_tokens > 0
    assert it.num_preemptions == 8


def test_a_step_of_several_clients_has_one_chunk_of_each() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=16, step_tokens=0)
    for index in range(10):
        it.add(of("flood", f"f{index}", tokens=60))
        it.add(of("other", f"o{index}", tokens=40))
    for _ in range(6):
        batch = it.schedule()
        begun = [chunk for chunk in batch.prefills if chunk.start]
        assert len(begun) <= 2
        sample(batch)
    assert {chunk.sequences[0].group.client for chunk in begun} == {"flood", "other"}


def test_a_long_prompt_goes_on_beside_ever_new_short_ones() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=32, step_tokens=0)
    for index in range(12):
        it.add(of("flood", f"f{index}", tokens=3))
    sample(it.schedule())
    long = of("long", "long", tokens=20)
    it.add(long)
    for step in range(50):
        it.add(of("short", f"s{step}"))
        sample(it.schedule())
        for one in [one for one in it.running if one.group.client == "short" and one.num_output_tokens]:
            it.remove(one.group)
    assert long.sequences[0].num_output_tokens > 0


def test_late_sequences_do_not_count_for_their_clients_share() -> None:
    it = scheduler(num_blocks=256, max_num_seqs=32, step_tokens=0)
    for client, number in (("other", 6), ("flood", 12)):
        for index in range(number):
            it.add(of(client, f"{client} {index}", tokens=3))
        for _ in range(30):
            sample(it.schedule())
    late = [one for one in it.running if one.group.client == "other"]
    assert len(late) == 6
    for one in late:
        one.is_late = True
    it.add(of("other", "new"))
    assert "new" in [name for _ in range(2) for name in names(it.schedule())[0]]


def test_no_sequence_is_preempted_for_a_client_that_may_not_start_more() -> None:
    it = scheduler(num_blocks=512, max_num_seqs=32, max_num_batched_tokens=200, step_tokens=4)
    for index in range(28):
        it.add(of("flood", f"f{index}", tokens=3))
    sample(it.schedule())
    for index in range(4):  # its share of a step
        it.add(of("other", f"o{index}", tokens=3))
    for _ in range(8):
        sample(it.schedule())
    assert it.num_preemptions == 0
    assert clients(it).count("other") == it.share(2) == 4
    it.add(of("other", "wide", n=8))
    for _ in range(4):
        sample(it.schedule())
    assert it.num_preemptions == 0


@given(st.data())
def test_sequences_of_several_clients_all_end(data: st.DataObject) -> None:
    it = scheduler(
        num_blocks=data.draw(st.sampled_from([12, 24, 64])), max_num_seqs=6, step_tokens=data.draw(st.integers(0, 8))
    )
    waiting = [
        of(data.draw(st.sampled_from("abc")), f"{index}", data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6)))
        for index in range(data.draw(st.integers(1, 10)))
    ]
    for each in waiting:
        fits = 3 * (each.sequences[0].length + 8) <= it.blocks.num_blocks * BLOCK
        if len(each.sequences) == 3 and fits and data.draw(st.booleans()):
            each.beams = BeamSearch(SamplingParams(use_beam_search=True, n=3, temperature=0), 8, frozenset())
    lengths = {group: group.sequences[0].length + data.draw(st.integers(1, 8)) for group in waiting}
    left = set(waiting)
    for _ in range(2_000):
        if waiting and (not left - set(waiting) or data.draw(st.booleans())):
            it.add(waiting.pop())
        batch = it.schedule()
        assert len({one.seq_id for one in batch.decodes}) == len(batch.decodes)
        sample(batch)
        for one in list(it.running):
            if one.length >= lengths[one.group]:
                one.finish(SequenceStatus.FINISHED_STOPPED)
        it.drop_finished()
        for ended in [group for group in left if all(one.is_finished() for one in group.sequences)]:
            it.remove(ended)
            left.discard(ended)
        if not left:
            break
    assert not left
    assert it.blocks.num_free == it.blocks.num_blocks
