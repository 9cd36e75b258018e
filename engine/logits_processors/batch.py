"""PersistentBatch: the batch as logits processors see it, a list with rows that come, go and move."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from engine.logits_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from engine.sequence import Sequence


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
