"""Slots: an index for each sequence that stays its own while it runs, and the tokens at each index."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence, SequenceStatus

__all__ = ["Slots"]


class Slots:
    """What processors of the revised model share.

    Args:
        count: indices there are: as many as a batch can have rows.
        max_model_len: tokens of a sequence, at the most.
    """

    def __init__(self, count: int, max_model_len: int) -> None:
        self.holders: dict[int, Sequence] = {}
        """By index. Parked sequences keep theirs; who has ended or was preempted loses it at the next `take`."""
        self.token_ids: NDArray[np.int32] = np.zeros((count, max_model_len), dtype=np.int32)
        self.seq_lens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._of: dict[Sequence, int] = {}
        self._free = list(range(count))[::-1]

    def take(self, rows: Rows[Sequence]) -> NDArray[np.int64]:
        """Give everybody an index and bring the tokens up to date. Returns int64 `[rows]`: who is where."""
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
        if not self._free:  # parked ones that were preempted come on top of those that run: somebody waits elsewhere
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
