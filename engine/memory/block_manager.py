"""BlockManager: assigns blocks of the KV cache to sequences. Shared blocks are counted
and copied on write.

With the prefix cache, full blocks are found again by their content: by their tokens and
the block before them. A block that no sequence uses keeps its content until it is
needed, least recently used first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_Content = tuple[int, tuple[int, ...]]
"""Id of the prefix before a block (0: none), and the block's tokens. Compared exactly,
so no two prefixes collide."""


class BlockManager:
    """Assigns blocks of `block_size` token slots. Sequences that start from one prompt
    share its blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_seqs: int,
        max_blocks: int,
        prefix_cache: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: NDArray[np.int64] = np.zeros(
            (max_seqs, max_blocks), dtype=np.int64
        )
        """The block tables of all sequences, so that a step reads them with one
        gather."""
        self.rows: dict[int, int] = {}
        """By sequence: its row of `tables`."""
        self.row_copies: list[tuple[int, int]] = []
        """(source, target) rows of which one sequence continues another's output, since
        the last forward pass. All sources are read before any target is written."""
        self.tokens_looked_up = self.tokens_found = 0
        """Numbers of tokens that were looked up in the prefix cache, and that it
        had."""
        self._prefix_cache = prefix_cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """The next block to be used comes first."""
        self._free_rows = list(range(max_seqs))[::-1]
        self._count = [0] * num_blocks
        self._known: dict[_Content, tuple[int, int]] = {}
        """(id of the prefix that ends with this content, block)."""
        self._content: dict[int, _Content] = {}
        """Content of the blocks in `_known`, by block."""
        self._prefix_ids = itertools.count(1)
        self._prefixes: dict[int, list[int]] = {}
        """By sequence: the prefix ids of its first blocks, as far as these are
        known."""
        self._blocks: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def blocks(self, seq_id: int) -> list[int]:
        """Return the sequence's blocks, in the order of its tokens."""
        return list(self._blocks[seq_id])

    def allocate(
        self, seq_ids: Sequence[int], num_tokens: int, tokens: Sequence[int] = ()
    ) -> int:
        """Assign blocks for the `num_tokens` tokens that the sequences have in common.
        Raises `MemoryError` if too few are free. Returns how many of `tokens` the
        prefix cache has: never all, because the last has to be computed."""
        first, *others = seq_ids
        prefixes, known = self._find(tokens)
        needed = self.blocks_for(num_tokens) - len(known)
        if needed + sum(not self._count[block] for block in known) > len(self._free):
            raise MemoryError(f"{needed} blocks are needed, {len(self._free)} are free")
        for block in known:
            self._free.pop(block, None)
            self._count[block] += 1
        for seq_id in seq_ids:
            self.rows[seq_id] = self._free_rows.pop()
            self._blocks[seq_id] = []
        self._set(first, known + [self._take() for _ in range(needed)], prefixes)
        self._share(dict.fromkeys(others, first))
        self.tokens_looked_up += len(tokens)
        self.tokens_found += len(known) * self.block_size
        return len(known) * self.block_size

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return prefix ids and blocks of the longest known beginning of `tokens`,
        without the last token."""
        size = self.block_size
        prefixes: list[int] = []
        blocks: list[int] = []
        for start in range(0, len(tokens) - size if self._prefix_cache else 0, size):
            known = self._known.get(
                (prefixes[-1] if prefixes else 0, tuple(tokens[start : start + size]))
            )
            if known is None:
                break
            prefixes.append(known[0])
            blocks.append(known[1])
        return prefixes, blocks

    def note_content(
        self, seq_id: int, computed: int, span: Callable[[int, int], list[int]]
    ) -> None:
        """Note what the sequence's full blocks contain, so that other sequences find
        them. `computed` of its tokens are in the cache, or will be after this step.
        `span` returns its tokens between two positions."""
        size = self.block_size
        prefixes = self._prefixes.get(seq_id)
        if prefixes is None or not self._prefix_cache:
            return
        for index in range(len(prefixes), computed // size):
            content = (
                prefixes[-1] if prefixes else 0,
                tuple(span(index * size, (index + 1) * size)),
            )
            known = self._known.get(content)
            if known is None:
                block = self._blocks[seq_id][index]
                known = self._known[content] = next(self._prefix_ids), block
                self._content[block] = content
            prefixes.append(known[0])

    def append_slot(self, seq_id: int, position: int) -> tuple[int, int] | None:
        """Make the slot of `position` (the sequence's last or next one) writable.
        Returns `(source, target)` if a shared block must be copied before the forward
        pass. Raises `MemoryError` if no block is free."""
        blocks = self._blocks[seq_id]
        index = position // self.block_size
        if index < len(blocks) and self._count[blocks[index]] == 1:
            self._forget(blocks[index])  # it may have been shared at a rollback
            return None
        if not self._free:
            raise MemoryError("no block is free")
        target = self._take()
        self.tables[self.rows[seq_id], index] = target
        if index == len(blocks):
            blocks.append(target)
            return None
        source = blocks[index]
        self._count[source] -= 1
        blocks[index] = target
        return source, target

    def extend(self, positions: Mapping[int, int]) -> bool:
        """Make a slot of each sequence, the last or next one, writable. Returns False,
        and changes nothing, if a block would have to be copied, or there is none for
        it."""
        missing: list[int] = []
        for seq_id, position in positions.items():
            blocks = self._blocks[seq_id]
            index = position // self.block_size
            if index == len(blocks):
                missing.append(seq_id)
            elif self._count[blocks[index]] > 1:
                return False
            if index == self.tables.shape[1]:
                return False
        if len(missing) > len(self._free):
            return False
        for seq_id, position in positions.items():
            self.append_slot(seq_id, position)
        return True

    def take_over(self, parents: Mapping[int, int]) -> None:
        """Let each sequence continue the output of its parent, all at once: a parent
        may be a child of another."""
        self._share(parents)
        self.row_copies += [
            (self.rows[parent], self.rows[child]) for child, parent in parents.items()
        ]

    def _share(self, parents: Mapping[int, int]) -> None:
        """Give each sequence the blocks of its parent."""
        shared = {
            child: (self._blocks[parent][:], self._prefixes[parent][:])
            for child, parent in parents.items()
        }
        for blocks, _ in shared.values():
            for block in blocks:
                self._count[block] += 1
        for child, (blocks, prefixes) in shared.items():
            self._release(self._blocks[child])
            self._set(child, blocks, prefixes)

    def rollback(self, seq_id: int, num_tokens: int) -> None:
        """Note that the sequence's tokens after the first `num_tokens` will be computed
        again, and may be others."""
        first = num_tokens // self.block_size
        del self._prefixes.get(seq_id, [])[first:]
        for block in self._blocks.get(seq_id, [])[first:]:
            if self._count[block] == 1:  # a shared one is copied before it is written
                self._forget(block)

    def free(self, seq_id: int) -> None:
        """Free the sequence's blocks. A sequence without blocks is ignored."""
        if seq_id in self._blocks:
            self._release(self._blocks.pop(seq_id))
            self._free_rows.append(self.rows.pop(seq_id))
            del self._prefixes[seq_id]

    def forget_content(self) -> None:
        """Empty the prefix cache."""
        self._known.clear()
        self._content.clear()

    def _set(self, seq_id: int, blocks: list[int], prefixes: list[int]) -> None:
        self._blocks[seq_id] = blocks
        self._prefixes[seq_id] = prefixes
        self.tables[self.rows[seq_id], : len(blocks)] = blocks

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # the last one is used again first
            self._count[block] -= 1
            if not self._count[block]:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._count[block] = 1
        return block

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._known[content]
