"""Leases: which row of a worker's segment is promised to which sequence, and when it is free again.

A row that was sent out belongs to the worker until it answered for exactly that request: its number is in `Rows.done`
then. A fill that ends many steps late then writes into a row that is nobody else's. A sequence keeps its row from step
to step. Leases die with their segment, when the incarnation does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.segment import Rows

__all__ = ["NOBODY", "Leases"]

NOBODY = -1


class Leases:
    """The rows of one segment. Used from one thread, but for `oldest`."""

    def __init__(self, rows: Rows) -> None:
        count = len(rows.done)
        self._done = rows.done
        self._asked = np.zeros(count, np.int64)
        """The number of the newest request that a row was sent out with."""
        self._sent = np.zeros(count)
        """`time.monotonic()` of that request, or of the first one where it was repeated; infinite where it doesn't
        matter when the answer comes."""
        self._again = np.zeros(count)
        """`time.monotonic()` of the last repetition, or of the request where that isn't in `_sent`."""
        self.owners = [NOBODY] * count
        """The sequence that a row is lent to, or was, until the worker has answered."""
        # Last returned, first lent: few pages of the segment are ever touched.
        self._free = list(range(count - 1, -1, -1))
        self._leaving: list[int] = []
        """Given back, and not yet answered for."""

    @property
    def num_free(self) -> int:
        """Rows that can be lent, now or when they are renewed."""
        return len(self._free) + sum(not self.owed(row) for row in self._leaving)

    def take(self, sequence: int) -> int:
        """Lend a row to a sequence; `NOBODY` where all are out."""
        if not self._free:
            return NOBODY
        row = self._free.pop()
        self.owners[row] = sequence
        return row

    def ask(self, rows: NDArray[np.intp], number: int, now: float) -> None:
        """The rows were sent out: they are the worker's until it is done with request `number`, the latest so far."""
        self._asked[rows] = number
        self._sent[rows] = now

    def owed(self, row: int) -> bool:
        """Whether the worker has not answered for a row."""
        return bool(self._done[row] < self._asked[row])

    def asked(self, row: int) -> int:
        """The number of the newest request that a row was sent out with."""
        return int(self._asked[row])

    def answer(self, row: int) -> None:
        """The worker answered for a row in words."""
        self._done[row] = self._asked[row]

    def give_back(self, row: int, watched: bool = True) -> None:
        """Its sequence doesn't want the row any more: it may be lent again once the worker has answered and it was
        renewed.

        Args:
            watched: it matters when the worker answers.
        """
        self._leaving.append(row)
        if not watched and self.owed(row):
            self._again[row] = max(self._again[row], self._sent[row])
            self._sent[row] = math.inf

    def renew(self) -> None:
        """Nobody reads what was given back: lend again what the worker has answered for."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        for row in leaving:
            if self.owed(row):
                self._leaving.append(row)
            else:
                self.owners[row] = NOBODY
                self._free.append(row)

    def reclaim(self, row: int) -> bool:
        """Take a row from a sequence that has no use for it now; False where the worker owes an answer for it."""
        if self.owed(row):
            return False
        self._free.append(row)
        return True

    @property
    def owes(self) -> bool:
        """Whether the worker has not answered for some row."""
        return bool((self._asked > self._done).any())

    def unanswered(self, before: float) -> list[int]:
        """Rows that were last sent out earlier than `before`, and that the worker has not answered for."""
        last = np.where(np.isinf(self._sent), self._again, np.maximum(self._sent, self._again))
        rows: list[int] = np.flatnonzero((self._asked > self._done) & (last < before)).tolist()
        return rows

    def since(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """`time.monotonic()` of when rows were first asked for."""
        return self._sent[list(rows)]

    def repeated(self, rows: Sequence[int], since: NDArray[np.float64], now: float) -> None:
        """The rows were asked for once more: what was owed `since` then is owed for as long."""
        self._sent[list(rows)] = since
        self._again[list(rows)] = now

    def outstanding(self) -> list[int]:
        """Rows that the worker has not answered for."""
        rows: list[int] = np.flatnonzero(self._asked > self._done).tolist()
        return rows

    def oldest(self) -> float:
        """`time.monotonic()` of the oldest request without an answer; infinite where there is none. From any
        thread."""
        rows = self._asked > self._done
        return float(self._sent[rows].min()) if rows.any() else math.inf
