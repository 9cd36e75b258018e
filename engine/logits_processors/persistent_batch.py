"""PersistentBatch: the batch as one logits processor knows it, and the updates when it changes."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from engine.logits_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from engine.sequence import Sequence

__all__ = ["PersistentBatch"]


class PersistentBatch:
    """Computes a `BatchUpdate` from the rows of each step.

    The algorithm is that of vLLM's model runner: new sequences take the lowest free places, then places at the end.
    Remaining free places are filled from the end. Swaps then bring each sequence to its row.
    """

    def __init__(self) -> None:
        self.rows: list[Sequence] = []
        """The sequence of each row."""

    def update(self, rows: Rows[Sequence]) -> BatchUpdate | None:
        """Change to this batch. Returns None if it is the same as before."""
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
        moved = [*_condense(places, removed), *_reorder(places, rows)]
        self.rows = rows
        return BatchUpdate(len(rows), removed[::-1], added, moved)


def _condense(places: list[Sequence | None], holes: list[int]) -> list[MovedRequest]:
    """Fill the holes, the lowest first, from the end of the list, and cut the list."""
    moves: list[MovedRequest] = []
    for hole in holes:
        while places and places[-1] is None:
            places.pop()
        if hole >= len(places):
            break
        moves.append((len(places) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
        places[hole] = places.pop()
    while places and places[-1] is None:
        places.pop()
    return moves


def _reorder(places: list[Sequence | None], rows: list[Sequence]) -> list[MovedRequest]:
    moves: list[MovedRequest] = []
    where = {sequence: index for index, sequence in enumerate(places)}
    for index, sequence in enumerate(rows):
        other = places[index]
        if other is sequence:
            continue
        place = where[sequence]
        places[index], places[place] = sequence, other
        where[other] = place
        moves.append((index, place, MoveDirectionality.SWAP))
    return moves
