"""Leases: which row of a worker's segment is promised to which (sequence, position), and when it is free again.

A row that was sent out belongs to the worker until it answered for exactly that lease. A fill that ends many steps
late then writes into a row that is nobody else's. Leases die with their segment, when the incarnation does.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from guided.messages import RowResult

__all__ = ["Lease", "Leases"]

NOBODY = -1


class Lease(msgspec.Struct, eq=False, gc=False):
    """One row of one incarnation's segment, promised to one fill."""

    row: int
    sequence: int
    position: int
    start: int
    tokens: list[int]
    sent: float
    """`time.monotonic()` of the fill."""
    index: int = NOBODY
    """Which row of the current step waits for it; `NOBODY` where none does."""
    message: int = 0
    """Which message to the actor asked for it last: only that one's answer counts."""
    asked_again: float = 0.0
    """`time.monotonic()` of when it was asked for once more, because nothing came."""
    result: RowResult | None = None
    """The worker's answer, until somebody takes it."""
    abandoned: bool = False
    """Nobody will ever ask for it: free the row as soon as the worker answered."""


class Leases:
    """The rows of one segment. Used from one thread."""

    def __init__(self, rows: int) -> None:
        # Last returned, first lent: few pages of the segment are ever touched.
        self._free = list(range(rows - 1, -1, -1))
        self._out: dict[int, Lease] = {}
        self.message = 1
        """The number of the message that is being put together; the actor handles none twice, nor an older one."""
        self.answered = 0
        """The number of the message whose answers are being read."""

    @property
    def num_free(self) -> int:
        """Rows that can be lent."""
        return len(self._free)

    @property
    def outstanding(self) -> Collection[Lease]:
        """Leases that the worker has not answered for, oldest first."""
        return self._out.values()

    @property
    def oldest(self) -> Lease | None:
        """The lease that has waited longest for its answer: what the worker is busy with, or stuck in."""
        return next(iter(self._out.values()), None)

    def lent(self, row: int) -> Lease | None:
        """The unanswered lease of a row."""
        return self._out.get(row)

    def take(self, sequence: int, start: int, tokens: list[int], now: float, index: int) -> Lease | None:
        """Lend a row for a fill; None where all are out."""
        if not self._free:
            return None
        row = self._free.pop()
        lease = self._out[row] = Lease(row, sequence, start + len(tokens), start, tokens, now, index, self.message)
        return lease

    def unsent(self, lease: Lease) -> None:
        """Take back a lease whose message never left."""
        if self._out.get(lease.row) is lease:
            del self._out[lease.row]
            self._free.append(lease.row)

    def answer(self, result: RowResult) -> Lease | None:
        """The worker answered: the lease that the answer is for, None where there is no such lease (any more).

        The row stays reserved until `give_back`, unless nobody wants it.
        """
        lease = self._out.get(result.row)
        if (
            lease is None
            or lease.message != self.answered
            or lease.sequence != result.sequence
            or lease.position != result.position
        ):
            return None
        del self._out[result.row]
        lease.result = result
        if lease.abandoned:
            self._free.append(lease.row)
            return None
        return lease

    def give_back(self, lease: Lease) -> None:
        """The answered row was read, or isn't wanted: it may be lent again. At once, or when the worker answered."""
        if lease.abandoned:
            return
        lease.abandoned = True
        lease.index = NOBODY
        if lease.result is not None:
            self._free.append(lease.row)
