"""The batch as logits processors see it: rows that move (`PersistentBatch`), or fixed indices (`RequestIndices`)."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from engine.logits_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from engine.sequence import Sequence, SequenceStatus


class PersistentBatch:
    """Computes a `BatchUpdate` from the rows of each step.

    As in vLLM's model runner, new sequences take the lowest free places, then places at the end. Moves then fill the
    places that are still free, and swaps bring each sequence to its row.
    """

    def __init__(self) -> None:
        self.rows: list[Sequence] = []
        """The sequence of each row."""

    def update(self, rows: Rows[Sequence]) -> BatchUpdate | None:
        """Return the update from the previous batch to this one; None if it is the same."""
        rows = list(rows)
        if rows == self.rows:
            return None
        places: list[Sequence | None] = list(self.rows)
        staying, known = set(rows), set(self.rows)
        free = [index for index, sequence in enumerate(self.rows) if sequence not in staying]
        added: list[AddedRequest] = []
        for count, sequence in enumerate(sequence for sequence in rows if sequence not in known):
            if count < len(free):
                index = free[count]
                places[index] = sequence
            else:
                index = len(places)
                places.append(sequence)
            data = sequence.data
            added.append((index, sequence.params, data.prompt_token_ids, data.output_token_ids))
        removed = free[len(added) :]
        for index in removed:
            places[index] = None
        moved = _condense(places, removed) + _reorder(places, rows)
        self.rows = rows
        return BatchUpdate(len(rows), removed[::-1], added, moved)


def _condense(places: list[Sequence | None], empty: list[int]) -> list[MovedRequest]:
    """Move the sequence of the highest place to the lowest empty place, until no place is empty."""
    moves: list[MovedRequest] = []
    for target in empty:
        while places and places[-1] is None:
            places.pop()
        if target >= len(places):
            break
        places[target] = places.pop()
        moves.append((len(places), target, MoveDirectionality.UNIDIRECTIONAL))
    return moves


def _reorder(places: list[Sequence | None], rows: list[Sequence]) -> list[MovedRequest]:
    """Swap each sequence into its row."""
    moves: list[MovedRequest] = []
    where = {sequence: index for index, sequence in enumerate(places)}
    for index, sequence in enumerate(rows):
        other, place = places[index], where[sequence]
        if other is not sequence:
            places[index], places[place] = sequence, other
            where[other] = place
            moves.append((index, place, MoveDirectionality.SWAP))
    return moves


class RequestIndices:
    """Assigns `count` indices, one per row of the largest batch. Shared by all processors of the revised model."""

    def __init__(self, count: int, max_model_len: int) -> None:
        self.holders: dict[int, Sequence] = {}
        """By index. Late sequences keep theirs. Ended and preempted sequences lose theirs at the next `assign`."""
        self.token_ids: NDArray[np.int32] = np.zeros((count, max_model_len), dtype=np.int32)
        self.seq_lens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._of: dict[Sequence, int] = {}
        self._edits: dict[int, int] = {}
        """By index: `Sequence.edits` when `token_ids` was written."""
        self._free = list(range(count))[::-1]

    def assign(self, rows: Rows[Sequence]) -> NDArray[np.int64]:
        """Assign an index to each row and update the tokens. Returns the indices, int64 `[rows]`."""
        wanted = set(rows)
        for sequence in [sequence for sequence in self._of if sequence not in wanted]:
            if sequence.status is not SequenceStatus.RUNNING:
                self._release(sequence)
        for sequence in rows:
            if sequence not in self._of:
                self._enter(sequence)
            index, length = self._of[sequence], sequence.length
            known = int(self.seq_lens[index]) if self._edits.get(index) == sequence.edits else 0
            self._edits[index] = sequence.edits
            if known < length:
                prompt, output = sequence.data.prompt_token_ids, sequence.data.output_token_ids
                fresh = output[known - len(prompt) :] if known >= len(prompt) else sequence.data.token_ids[known:]
                self.token_ids[index, known:length] = fresh
                self.seq_lens[index] = length
        return np.array([self._of[sequence] for sequence in rows], dtype=np.int64)

    def _enter(self, sequence: Sequence) -> None:
        index = self._free.pop()
        self._of[sequence] = index
        self.holders[index] = sequence
        self.seq_lens[index] = 0

    def _release(self, sequence: Sequence) -> None:
        index = self._of.pop(sequence)
        del self.holders[index]
        self.seq_lens[index] = 0
        self._free.append(index)
