"""BlockManager: which blocks of the KV cache belong to which sequence. Paged, counted, copied on write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockManager"]


class BlockManager:
    """Hands out blocks of `block_size` token slots.

    Sequences that start from one prompt share its blocks; each block is counted, and one that is shared is copied by
    the first who writes into it. `tables` is the block tables of all sequences as one array, so that a step's are one
    gather: sequence s has row `row(s)`.

    Args:
        max_seqs: rows of `tables`.
        max_blocks: columns of `tables`: blocks one sequence can have.
    """

    def __init__(self, num_blocks: int, block_size: int, *, max_seqs: int, max_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: NDArray[np.int64] = np.zeros((max_seqs, max_blocks), dtype=np.int64)
        self._free = list(range(num_blocks))[::-1]
        self._count = [0] * num_blocks
        self._blocks: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._free_rows = list(range(max_seqs))[::-1]

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def row(self, seq_id: int) -> int:
        """The row of `tables` that is this sequence's."""
        return self._rows[seq_id]

    def blocks(self, seq_id: int) -> list[int]:
        """The sequence's blocks, in the order of its tokens."""
        return list(self._blocks[seq_id])

    def allocate(self, seq_ids: Sequence[int], num_tokens: int) -> None:
        """Give the sequences blocks for the `num_tokens` tokens that they have in common.

        Raises:
            MemoryError: fewer blocks are free.
        """
        first, *others = seq_ids
        needed = self.blocks_for(num_tokens)
        if needed > len(self._free):
            raise MemoryError(f"{needed} blocks are needed, {len(self._free)} are free")
        self._adopt(first, [self._take() for _ in range(needed)])
        for seq_id in others:
            self.fork(first, seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let `child_id` share all blocks that `parent_id` has."""
        shared = self._blocks[parent_id]
        for block in shared:
            self._count[block] += 1
        self._adopt(child_id, list(shared))

    def needs_block(self, seq_id: int, position: int) -> bool:
        """Whether `append_slot` will take a free block."""
        blocks = self._blocks[seq_id]
        index = position // self.block_size
        return index >= len(blocks) or self._count[blocks[index]] > 1

    def append_slot(self, seq_id: int, position: int) -> tuple[int, int] | None:
        """Make the slot of `position` (its last one or the next) the sequence's own to write.

        Returns:
            `(source, target)` where a shared block has to be copied before the step's forward pass.

        Raises:
            MemoryError: no block is free.
        """
        blocks = self._blocks[seq_id]
        index = position // self.block_size
        if index < len(blocks) and self._count[blocks[index]] == 1:
            return None
        if not self._free:
            raise MemoryError("no block is free")
        target = self._take()
        row = self.tables[self._rows[seq_id]]
        row[index] = target
        if index == len(blocks):
            blocks.append(target)
            return None
        source = blocks[index]
        self._count[source] -= 1
        blocks[index] = target
        return source, target

    def free(self, seq_id: int) -> None:
        """Give the sequence's blocks back. One without blocks is ignored."""
        for block in self._blocks.pop(seq_id, ()):
            self._count[block] -= 1
            if not self._count[block]:
                self._free.append(block)
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free_rows.append(row)

    def _take(self) -> int:
        block = self._free.pop()
        self._count[block] = 1
        return block

    def _adopt(self, seq_id: int, blocks: list[int]) -> None:
        row = self._free_rows.pop()
        self._rows[seq_id] = row
        self._blocks[seq_id] = blocks
        self.tables[row, : len(blocks)] = blocks
