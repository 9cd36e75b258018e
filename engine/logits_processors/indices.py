"""RequestIndices: a fixed index for each running sequence, and the tokens at each index."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence, SequenceStatus

__all__ = ["RequestIndices"]


class RequestIndices:
    """Assigns indices. Shared by all processors of the revised model.

    Args:
        count: number of indices: maximum number of rows in a batch.
        max_model_len: maximum number of tokens of a sequence.
    """

    def __init__(self, count: int, max_model_len: int) -> None:
        self.holders: dict[int, Sequence] = {}
        """By index. Parked sequences keep theirs. Ended and preempted sequences lose theirs at the next `assign`."""
        self.token_ids: NDArray[np.int32] = np.zeros((count, max_model_len), dtype=np.int32)
        self.seq_lens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._of: dict[Sequence, int] = {}
        self._free = list(range(count))[::-1]

    def assign(self, rows: Rows[Sequence]) -> NDArray[np.int64]:
        """Assign an index to each row and update the tokens. Returns the indices, int64 `[rows]`."""
        wanted = set(rows)
        for sequence in [sequence for sequence in self._of if sequence not in wanted]:
            if sequence.status is not SequenceStatus.RUNNING:
                self._release(sequence)
        for sequence in rows:
            if sequence not in self._of:
                self._enter(sequence, wanted)
            index, length = self._of[sequence], sequence.length
            known = int(self.seq_lens[index])
            if known < length:
                prompt, output = sequence.data.prompt_token_ids, sequence.data.output_token_ids
                fresh = output[known - len(prompt) :] if known >= len(prompt) else sequence.data.token_ids[known:]
                self.token_ids[index, known:length] = fresh
                self.seq_lens[index] = length
        return np.array([self._of[sequence] for sequence in rows], dtype=np.int64)

    def _enter(self, sequence: Sequence, wanted: set[Sequence]) -> None:
        if not self._free:  # with preempted parked sequences there are more sequences than rows: take one from outside
            self._release(next(holder for holder in self._of if holder not in wanted))
        index = self._free.pop()
        self._of[sequence] = index
        self.holders[index] = sequence
        self.seq_lens[index] = 0

    def _release(self, sequence: Sequence) -> None:
        index = self._of.pop(sequence)
        del self.holders[index]
        self.seq_lens[index] = 0
        self._free.append(index)
