"""BlockManager: assigns blocks of the KV cache to sequences. Shared blocks are counted and copied on write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockManager:
    """Assigns blocks of `block_size` token slots.

    Sequences that start from one prompt share its blocks. A shared block is copied before the first write. `tables` has
    the block tables of all sequences in one array, so that a step reads them with one gather.

    Args:
        max_seqs: rows of `tables`.
        max_blocks: columns of `tables`: maximum number of blocks of one sequence.
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
        """Number of free blocks."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def row(self, seq_id: int) -> int:
        """Return the sequence's row of `tables`."""
        return self._rows[seq_id]

    def blocks(self, seq_id: int) -> list[int]:
        """Return the sequence's blocks, in the order of its tokens."""
        return list(self._blocks[seq_id])

    def allocate(self, seq_ids: Sequence[int], num_tokens: int) -> None:
        """Assign blocks for the `num_tokens` tokens that the sequences have in common.

        Raises:
            MemoryError: not enough blocks are free.
        """
        first, *others = seq_ids
        needed = self.blocks_for(num_tokens)
        if needed > len(self._free):
            raise MemoryError(f"{needed} blocks are needed, {len(self._free)} are free")
        self._adopt(first, [self._take() for _ in range(needed)])
        for seq_id in others:
            self.fork(first, seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Share all blocks of `parent_id` with `child_id`."""
        shared = self._blocks[parent_id]
        for block in shared:
            self._count[block] += 1
        self._adopt(child_id, list(shared))

    def append_slot(self, seq_id: int, position: int) -> tuple[int, int] | None:
        """Make the slot of `position` (the sequence's last or next one) writable for the sequence.

        Returns:
            `(source, target)` if a shared block must be copied before the step's forward pass, else None.

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
        """Free the sequence's blocks. A sequence without blocks is ignored."""
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
