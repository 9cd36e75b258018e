"""Step: one step's fills, and what became of them so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.link import Link, Mailed
from actors.placed import Placed
from guided.pool import Fill, ReadyRows, Row

__all__ = ["Part", "Step"]


class Part:
    """Fills that one message asked for.

    Args:
        fills: the step's.
        unusual: sequences whose answer is news, by their place in `mailed`.
    """

    def __init__(
        self, link: Link, mailed: Mailed, fills: Sequence[Fill], unusual: Sequence[tuple[int, Placed]]
    ) -> None:
        self.link = link
        self.number = mailed.number
        self.rows = mailed.rows
        self.indices = mailed.indices
        """Their places in the step."""
        self.unusual = unusual
        self.ready: NDArray[np.bool_] = np.zeros(len(self.rows), np.bool_)
        self.open: NDArray[np.bool_] | None = None
        """Those that were not decided otherwise; None for all."""
        self.left = len(self.rows)
        self._memory = link.rows
        self._fills = fills

    def fill(self, place: int) -> Fill:
        """What was asked for."""
        return self._fills[int(self.indices[place])]

    def look(self) -> None:
        """See what is there now."""
        self.ready = self._memory.done[self.rows] == self.number
        if self.open is not None:
            self.ready &= self.open
            self.left = int(np.count_nonzero(self.open)) - int(np.count_nonzero(self.ready))
        else:
            self.left = len(self.rows) - int(np.count_nonzero(self.ready))

    def undecided(self) -> NDArray[np.intp]:
        """Places of what is missing."""
        missing = ~self.ready if self.open is None else self.open & ~self.ready
        return np.flatnonzero(missing)

    def give_up(self, place: int) -> None:
        """What is at `place` is decided otherwise."""
        if self.open is None:
            self.open = np.ones(len(self.rows), np.bool_)
        self.open[place] = False
        self.ready[place] = False
        self.look()

    @property
    def seconds(self) -> NDArray[np.float32]:
        """What each row took; of those that are ready."""
        return self._memory.seconds[self.rows]

    def masks(self) -> ReadyRows:
        """What is ready."""
        if self.open is None and not self.left:
            return ReadyRows(self._memory.masks, self.rows, self.indices)
        return ReadyRows(self._memory.masks, self.rows[self.ready], self.indices[self.ready])


class Step:
    """Used by `Rotation`, which decides each fill once."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        self.fills = fills
        self.parts: list[Part] = []
        self.other: dict[int, Row] = {}
        """What is decided and not ready."""
        self.unplaced: list[int] = []
        """Fills that no actor with their grammar was up for."""
        self.extra: list[tuple[Link, int]] = []
        """Rows that are lent for this step only."""

    def look(self) -> int:
        """See what is there now; returns how many fills are undecided."""
        left = len(self.unplaced)
        for part in self.parts:
            if part.left:
                part.look()
                left += part.left
        return left

    def undecided(self, link: Link | None = None) -> list[int]:
        """The rows that nothing is known of, as of the last `look`; from `link` alone, if one is given."""
        indices = [] if link is not None else list(self.unplaced)
        for part in self.parts:
            if part.left and link in (None, part.link):
                indices += part.indices[part.undecided()].tolist()
        return indices

    def waiting(self) -> dict[int, list[int]]:
        """The undecided rows, by sequence."""
        waiting: dict[int, list[int]] = {}
        for index in sorted(self.undecided()):
            waiting.setdefault(self.fills[index].sequence_id, []).append(index)
        return waiting

    def decide(self, index: int, row: Row) -> None:
        """Settle a row, not as ready; one that is settled stays so."""
        if index in self.other:
            return
        for part in self.parts:
            for place in np.flatnonzero(part.indices == index).tolist():
                if part.ready[place]:
                    return
                part.give_up(place)
        if index in self.unplaced:
            self.unplaced.remove(index)
        self.other[index] = row
