from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.block_manager import BlockManager

BLOCK = 4


class Blocks(RuleBasedStateMachine):
    """Any order of allocating, growing and freeing: nothing leaks, and no written block is shared."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, BLOCK, max_seqs=64, max_blocks=12)
        self.lengths: dict[int, int] = {}
        self.next_id = 0

    def new(self) -> int:
        self.next_id += 1
        return self.next_id

    @rule(target=sequences, tokens=st.integers(1, 20), others=st.integers(0, 2))
    def allocate(self, tokens: int, others: int) -> int:
        ids = [self.new() for _ in range(1 + others)]
        try:
            self.blocks.allocate(ids, tokens)
        except MemoryError:
            assert self.blocks.blocks_for(tokens) > self.blocks.num_free
        else:
            self.lengths.update(dict.fromkeys(ids, tokens))
        return ids[0]

    @rule(sequence=sequences)
    def grow(self, sequence: int) -> None:
        if sequence not in self.lengths or self.lengths[sequence] >= 12 * BLOCK:
            return
        position = self.lengths[sequence]
        before, free = self.blocks.blocks(sequence), self.blocks.num_free
        index = position // BLOCK
        needed = index == len(before) or self.holders()[before[index]] > 1
        try:
            copy = self.blocks.append_slot(sequence, position)
        except MemoryError:
            assert needed
            assert free == 0
            return
        self.lengths[sequence] += 1
        assert self.blocks.num_free == free - needed
        if copy is not None:
            assert copy == (before[-1], self.blocks.blocks(sequence)[-1])
        written = self.blocks.blocks(sequence)[position // BLOCK]
        assert all(written not in self.blocks.blocks(other) for other in self.lengths if other != sequence)

    def holders(self) -> Counter[int]:
        """How many sequences have each block."""
        return Counter(block for sequence in self.lengths for block in self.blocks.blocks(sequence))

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.blocks.free(sequence)
        self.lengths.pop(sequence, None)

    @invariant()
    def nothing_leaks(self) -> None:
        assert len(self.holders()) + self.blocks.num_free == self.blocks.num_blocks
        for sequence, tokens in self.lengths.items():
            mine = self.blocks.blocks(sequence)
            assert len(mine) == len(set(mine)) == self.blocks.blocks_for(tokens)
            assert list(self.blocks.tables[self.blocks.rows[sequence], : len(mine)]) == mine


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def cached(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, 4, max_seqs=8, max_blocks=16, prefix_cache=True)


def test_full_blocks_are_found_by_their_prefix() -> None:
    it = cached(16)
    first = list(range(10))
    assert it.allocate([1], 10, first) == 0
    it.note_content(1, len(first), lambda start, end: first[start:end])
    assert it.allocate([2, 3], 10, [*range(8), 50, 51]) == 8
    assert it.blocks(2)[:2] == it.blocks(3)[:2] == it.blocks(1)[:2]
    assert it.blocks(2)[2] != it.blocks(1)[2]
    assert it.allocate([4], 8, list(range(8))) == 4, "the last token is computed"
    assert it.allocate([5], 8, [9, 9, 9, 9, 4, 5, 6, 7]) == 0, "the second block has other tokens before it"
    assert (it.tokens_looked_up, it.tokens_found) == (36, 12)
    for seq_id in range(1, 6):
        it.free(seq_id)
    assert it.num_free == 16
    assert it.allocate([6], 9, list(range(9))) == 8, "blocks keep their content after their sequences"


def test_the_least_recently_used_block_is_evicted_first() -> None:
    it = cached(6)
    for seq_id, start in ((1, 0), (2, 100)):
        tokens = list(range(start, start + 9))
        it.allocate([seq_id], 9, tokens)
        it.note_content(seq_id, len(tokens), lambda start, end, tokens=tokens: tokens[start:end])  # type: ignore[misc]
    it.free(1)
    it.free(2)
    assert it.allocate([3], 9, [*range(100, 108), 0]) == 8
    assert it.num_free == 3
    it.allocate([4], 8, [7] * 8)  # takes the block without content and the end of the first
    assert it.allocate([5], 4, [*range(4)]) == 0
    it.free(3)
    it.free(4)
    it.free(5)
    assert it.allocate([6], 9, [*range(100, 109)]) == 8
    it.forget_content()
    it.free(6)
    assert it.allocate([7], 9, [*range(100, 109)]) == 0
    it.free(7)
    assert it.num_free == 6
