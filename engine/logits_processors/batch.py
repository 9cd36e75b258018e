"""The batch of logits processors: a list of rows that are added, removed and moved, or
requests with fixed indices."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.logits_processors.interface import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
    VllmConfig,
)
from engine.step.sequence import Sequence


class PersistentBatch:
    """Computes a `BatchUpdate` from the rows of each step. As in vLLM's model runner,
    new sequences take the lowest free places, then places at the end. Moves fill the
    remaining free places, and swaps bring sequences to their rows."""

    def __init__(self) -> None:
        self._rows: list[Sequence] = []

    def update(self, rows: list[Sequence]) -> BatchUpdate | None:
        """Return the update from the previous batch to `rows`, or None if they are
        equal."""
        if rows == self._rows:
            return None
        places: list[Sequence | None] = list(self._rows)
        staying = set(rows)
        known = set(self._rows)
        free = [
            index
            for index, sequence in enumerate(self._rows)
            if sequence not in staying
        ]
        added: list[AddedRequest] = []
        for count, sequence in enumerate(
            sequence for sequence in rows if sequence not in known
        ):
            if count < len(free):
                index = free[count]
            else:
                index = len(places)
            places[index : index + 1] = [sequence]
            added.append(
                (
                    index,
                    sequence.params,
                    sequence.prompt_token_ids,
                    sequence.output_token_ids,
                )
            )
        removed = free[len(added) :]
        for index in removed:
            places[index] = None
        moved = _condense(places, removed) + _reorder(places, rows)
        self._rows = rows
        return BatchUpdate(len(rows), removed[::-1], added, moved)


def _condense(places: list[Sequence | None], empty: list[int]) -> list[MovedRequest]:
    """Move the sequence with the highest place to the lowest empty place until no place
    is empty."""
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
        other = places[index]
        place = where[sequence]
        if other is not sequence:
            places[index] = sequence
            places[place] = other
            where[other] = place
            moves.append((index, place, MoveDirectionality.SWAP))
    return moves


class IndexedBatch:
    """Reports the rows of each step to a processor of the revised model (RFC 25389).
    Sequences have fixed indices."""

    def __init__(self, processor: Any, config: VllmConfig) -> None:
        count = config.scheduler_config.max_num_seqs
        self._processor = processor
        self._known: dict[Sequence, tuple[int, int, int]] = {}
        """The index of each sequence, and its numbers of edits and of tokens when
        `_token_ids` was written."""
        self._free = list(range(count))[::-1]
        self._token_ids: NDArray[np.int32] = np.zeros(
            (count, config.model_config.max_model_len), dtype=np.int32
        )
        self._seq_lens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._mapping: list[int] | None = None

    def update(self, rows: Rows[Sequence]) -> None:
        """Remove and add requests, write their new tokens, and call `update_state`."""
        staying = set(rows)
        for sequence in [known for known in self._known if known not in staying]:
            index, *_ = self._known.pop(sequence)
            self._free.append(index)
            self._seq_lens[index] = 0
            self._processor.remove_request(index)
        for sequence in rows:
            if sequence not in self._known:
                index = self._free.pop()
                self._known[sequence] = index, sequence.edits, 0
                self._processor.add_request(
                    (sequence.params, len(sequence.prompt_token_ids), index)
                )
            self._write(sequence)
        mapping = [self._known[sequence][0] for sequence in rows]
        same = mapping == self._mapping
        self._mapping = mapping
        self._processor.update_state(
            None if same else np.array(mapping, np.int64),
            self._token_ids,
            self._seq_lens,
        )

    def _write(self, sequence: Sequence) -> None:
        """Write the new tokens of a sequence, or all tokens if some were removed or
        replaced."""
        index, edits, start = self._known[sequence]
        if edits != sequence.edits:
            start = 0
        self._token_ids[index, start : sequence.length] = sequence.span(
            start, sequence.length
        )
        self._seq_lens[index] = sequence.length
        self._known[sequence] = index, sequence.edits, sequence.length
