"""Step: one step's fills, and what became of them so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.leases import Lease
from actors.link import Link
from actors.placed import Placed
from guided.pool import Fill, Row

__all__ = ["Step"]


class Step:
    """Used by `Rotation`, which decides each fill once."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        self.fills = fills
        self.rows: list[Row | None] = [None] * len(fills)
        self.undecided = len(fills)
        self.answered: list[tuple[Link, Lease]] = []
        """Leases that were answered before somebody asked: their masks wait in the segment."""
        self.opening: list[Placed] = []
        """Sequences that their actor hears of for the first time."""
        self.unplaced: list[int] = []
        """Fills that no actor with their grammar was up for."""
        self.collecting = False
        """Somebody waits for the rows now; until then masks stay where they are."""
        self.bitmask: NDArray[np.int32] | None = None
        """What they are copied to; None where they are read in place."""

    def waiting(self) -> dict[int, list[int]]:
        """The undecided rows, by sequence."""
        waiting: dict[int, list[int]] = {}
        for index, fill in enumerate(self.fills):
            if self.rows[index] is None:
                waiting.setdefault(fill.sequence_id, []).append(index)
        return waiting

    def decide(self, index: int, row: Row) -> None:
        """Settle a row; one that is settled stays so."""
        if self.rows[index] is None:
            self.rows[index] = row
            self.undecided -= 1
