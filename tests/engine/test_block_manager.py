from __future__ import annotations

from engine.memory.block_manager import BlockManager


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
    assert it.allocate([5], 8, [9, 9, 9, 9, 4, 5, 6, 7]) == 0, (
        "the second block has other tokens before it"
    )
    assert (it.tokens_looked_up, it.tokens_found) == (36, 12)
    for seq_id in range(1, 6):
        it.free(seq_id)
    assert it.num_free == 16
    assert it.allocate([6], 9, list(range(9))) == 8, (
        "blocks keep their content after their sequences"
    )


def test_the_least_recently_used_block_is_evicted_first() -> None:
    it = cached(6)
    for seq_id, start in ((1, 0), (2, 100)):
        tokens = list(range(start, start + 9))
        it.allocate([seq_id], 9, tokens)
        it.note_content(
            seq_id, len(tokens), lambda start, end, tokens=tokens: tokens[start:end]
        )  # type: ignore[misc]
    it.free(1)
    it.free(2)
    assert it.allocate([3], 9, [*range(100, 108), 0]) == 8
    assert it.num_free == 3
    # takes the block without content and the end of the first
    it.allocate([4], 8, [7] * 8)
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


def test_what_is_written_after_a_rollback_is_not_found_as_the_old_content() -> None:
    """Two sequences share three blocks. One is rolled back into the first, which is
    copied; the other ends; then the first one writes to the rest."""
    blocks = BlockManager(20, 4, max_seqs=4, max_blocks=10, prefix_cache=True)
    tokens = list(range(100, 114))
    blocks.allocate([1], 14, tokens)
    blocks.note_content(1, 14, lambda start, end: tokens[start:end])
    assert blocks.allocate([2], 14, tokens) == 12
    blocks.rollback(1, 1)
    assert blocks.append_slot(1, 1) is not None
    blocks.free(2)
    for position in range(2, 14):
        blocks.append_slot(1, position)
    found = blocks.allocate([3], 14, tokens)
    assert not {*blocks.blocks(1)} & {*blocks.blocks(3)[: found // 4]}
