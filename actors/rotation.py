"""Rotation: the actors that are up, the sequences placed on them, and the step that is under way.

All of it belongs to the engine's thread. Supervisors announce what comes and goes (`announce`, from any thread); it
takes effect at the next call, and at once in a `collect` that waits.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from actors.leases import NOBODY, Lease
from actors.link import Link
from actors.supervisor import Down, Up
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, from_wire
from guided.messages import OpenSequence, RowStatus
from guided.pool import Fill, Grammar, Row

__all__ = ["Rotation"]

_SLOW_SECONDS = 0.001
"""A sequence whose last row took longer is filled after its neighbours."""
_OVERDUE_SECONDS = 1.0
"""No new sequences for an actor that owes an answer for longer."""
_STATES: tuple[Literal["ready", "needs_history", "failed"], ...] = ("ready", "needs_history", "failed")
"""By `RowStatus`: a tuple, because hashing an enum's members costs more than all the rest of deciding a row."""


@dataclass(slots=True, eq=False)
class _Sequence:
    opening: OpenSequence
    link: Link | None
    """Where it is placed; None while it has to be placed (again)."""
    sent: bool = False
    """The actor may have a matcher for it."""
    confirmed: bool = False
    """The actor has a matcher for it."""
    lease: Lease | None = None
    """Its newest fill, until that was answered and read."""
    seconds: float = 0.0
    """What its last row took in the worker."""
    error: GuidedError | None = None
    """Why it is over."""


class _Step:
    """What became of a step's fills so far."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        self.fills = fills
        self.rows: list[Row | None] = [None] * len(fills)
        self.undecided = len(fills)
        self.answered: list[tuple[Link, Lease]] = []
        """Leases that were answered before somebody asked: their masks wait in the segment."""
        self.opening: list[_Sequence] = []
        """Sequences that their actor hears of for the first time."""
        self.unplaced: list[int] = []
        """Fills that no actor was up for."""

    def decide(self, index: int, row: Row) -> None:
        if self.rows[index] is None:
            self.rows[index] = row
            self.undecided -= 1


class Rotation:
    """Sequences on links, and the steps between them."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._sequences: dict[int, _Sequence] = {}
        self._lost: dict[int, GuidedError] = {}
        self._step = _Step(())
        self._number = 0
        self._news: deque[Up | Down] = deque()
        self._interrupted = False
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not before nobody can write to it any more.
        weakref.finalize(self, os.close, self._wake)
        self._poller.register(self._wake, zmq.POLLIN)

    def announce(self, news: Up | Down) -> None:
        """An actor came or went. From any thread."""
        self._news.append(news)
        os.eventfd_write(self._wake, 1)

    def interrupt(self) -> None:
        """End a `collect` that waits, for good. From any thread."""
        self._interrupted = True
        os.eventfd_write(self._wake, 1)

    def open(self, sequence_id: int, grammar: Grammar, parent_id: int | None) -> None:
        """See `MaskPool.open`."""
        self._take_news()
        opening = OpenSequence(sequence_id, grammar.key, parent_id)
        sequence = _Sequence(opening, None)
        if not self._place(sequence):
            raise PoolUnavailable("no mask worker is up")
        self._sequences[sequence_id] = sequence

    def free(self, sequence_ids: Collection[int]) -> None:
        """See `MaskPool.free`."""
        for sequence_id in sequence_ids:
            self._lost.pop(sequence_id, None)
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is None or sequence.link is None:
                continue
            link = sequence.link
            link.sequences.discard(sequence_id)
            if sequence.lease is not None:
                link.leases.give_back(sequence.lease)
            if sequence.sent:
                link.free(sequence_id)
        # With the next step's message; where there will be none, now.
        for link in self._links:
            if link.has_mail and not link.sequences:
                link.send(self._number)

    def submit(self, fills: Sequence[Fill]) -> None:
        """See `MaskPool.submit`."""
        self._abandon_step()
        self._take_news()
        self._number += 1
        step = self._step = _Step(fills)
        now = time.monotonic()
        sequences = self._sequences
        slow: list[tuple[float, int]] = []
        for index, fill in enumerate(fills):
            sequence = sequences.get(fill.sequence_id)
            if sequence is None:
                step.decide(index, Row("failed", error=BackendError(f"sequence {fill.sequence_id} is not open")))
            elif sequence.seconds > _SLOW_SECONDS:
                slow.append((sequence.seconds, index))
            else:
                self._fill(sequence, index, fill, now)
        for _, index in sorted(slow):
            self._fill(sequences[fills[index].sequence_id], index, fills[index], now)
        self._send()

    def collect(self, bitmask: NDArray[np.int32], timeout: float) -> list[Row]:
        """See `MaskPool.collect`."""
        step = self._step
        deadline = time.monotonic() + timeout
        for link, lease in step.answered:
            self._settle(link, lease, bitmask)
        for link in self._links:
            self._receive(link, bitmask)
        while step.undecided and not self._interrupted:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._wait(left, bitmask)
        self._abandon_step()
        return [row or Row("late") for row in step.rows]

    def failures(self) -> dict[int, GuidedError]:
        """See `MaskPool.failures`."""
        self._take_news()
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """Give up all connections and memory; everything that is still open is lost."""
        self._take_news()
        error = PoolUnavailable("the pool is shut down")
        for link in list(self._links):
            self._end(Down(link, error, hung=False), None)
        for sequence in self._sequences.values():
            sequence.error = sequence.error or error

    # placing

    def _place(self, sequence: _Sequence) -> bool:
        """Put a sequence on its parent's actor, or on the one with the fewest; False where none can take it."""
        opening = sequence.opening
        parent = self._sequences.get(opening.parent) if opening.parent is not None else None
        link = parent.link if parent is not None else None
        if link is None:
            able = [link for link in self._links if opening.grammar in link.installed] or self._links
            if not able:
                return False
            prompt = [link for link in able if not link.overdue(_OVERDUE_SECONDS)] or able
            link = min(prompt, key=lambda link: len(link.sequences))
        sequence.link = link
        link.sequences.add(opening.sequence)
        return True

    # a step's way out

    def _fill(self, sequence: _Sequence, index: int, fill: Fill, now: float) -> None:
        step = self._step
        if sequence.error is not None:
            step.decide(index, Row("failed", error=sequence.error))
            return
        if sequence.link is None and not self._place(sequence):
            step.unplaced.append(index)
            return
        link = sequence.link
        assert link is not None
        lease = sequence.lease
        if lease is not None:
            if _same(lease, fill) and lease.index == NOBODY:
                lease.index = index
                if lease.result is not None:
                    step.answered.append((link, lease))
                return
            if lease.index == NOBODY:
                link.leases.give_back(lease)
        lease = link.leases.take(fill.sequence_id, fill.start, list(fill.tokens), now, index)
        if lease is None:  # every row is out: this one has to wait for a later step
            step.decide(index, Row("late"))
            return
        sequence.lease = lease
        link.fill(lease, None if sequence.confirmed else sequence.opening)
        if not sequence.sent:
            sequence.sent = True
            step.opening.append(sequence)

    def _send(self) -> None:
        for link in self._links:
            if link.has_mail:
                self._not_sent(link, link.send(self._number))
        self._step.opening.clear()

    def _not_sent(self, link: Link, leases: list[Lease]) -> None:
        """It doesn't read, or is going: these fills are asked for again, of whoever is there then."""
        if not leases:
            return
        for sequence in self._step.opening:
            if sequence.link is link:
                sequence.sent = False
        for lease in leases:
            self._sequences[lease.sequence].lease = None
            self._step.decide(lease.index, Row("late"))

    # a step's way back

    def _wait(self, seconds: float, bitmask: NDArray[np.int32]) -> None:
        """Wait for answers or news, and deal with them."""
        happened = self._poller.poll(math.ceil(seconds * 1000))
        sockets = {socket for socket, _ in happened}
        for link in list(self._links):
            if link.socket in sockets:
                self._receive(link, bitmask)
        if self._wake in sockets:
            os.eventfd_read(self._wake)
            self._take_news(bitmask)
            self._send_unplaced()

    def _send_unplaced(self) -> None:
        step = self._step
        waiting, step.unplaced = step.unplaced, []
        for index in waiting:
            fill = step.fills[index]
            self._fill(self._sequences[fill.sequence_id], index, fill, time.monotonic())
        self._send()

    def _receive(self, link: Link, bitmask: NDArray[np.int32] | None) -> None:
        """Take the answers that are there. Without a `bitmask` masks stay where they are until they are asked for."""
        answer, sequences = link.leases.answer, self._sequences
        for results in link.receive():
            for result in results:
                lease = answer(result)
                if lease is None:
                    continue
                sequence = sequences.get(lease.sequence)
                if sequence is not None:
                    sequence.confirmed = True
                    sequence.seconds = result.seconds
                    if result.error is not None:
                        sequence.error = from_wire(result.error)
                if lease.index == NOBODY:
                    continue
                if bitmask is None:
                    self._step.answered.append((link, lease))
                else:
                    self._settle(link, lease, bitmask)

    def _settle(self, link: Link, lease: Lease, bitmask: NDArray[np.int32]) -> None:
        """An answered lease that the current step waits for: copy its mask, decide its row, give its place back."""
        result = lease.result
        if result is None or lease.index == NOBODY or link.closed:
            return
        status = result.status
        row = Row(_STATES[status], result.seconds)
        if status is RowStatus.READY:
            if not link.read(lease, bitmask[lease.index]):
                row = Row("failed", result.seconds, BackendError("the worker sent a mask of another size"))
        elif result.error is not None:
            row.error = from_wire(result.error)
        self._step.decide(lease.index, row)
        link.leases.give_back(lease)
        sequence = self._sequences.get(lease.sequence)
        if sequence is not None and sequence.lease is lease:
            sequence.lease = None

    def _abandon_step(self) -> None:
        """Nobody waits any more: what is late is kept for when its sequence asks again."""
        step, self._step = self._step, _Step(())
        if step.undecided:
            for link in self._links:
                for lease in list(link.leases.outstanding):
                    self._keep(link, lease)
        for link, lease in step.answered:
            self._keep(link, lease)

    def _keep(self, link: Link, lease: Lease) -> None:
        if lease.index == NOBODY:
            return
        lease.index = NOBODY
        sequence = self._sequences.get(lease.sequence)
        if sequence is None or sequence.lease is not lease:
            link.leases.give_back(lease)

    # actors that come and go

    def _take_news(self, bitmask: NDArray[np.int32] | None = None) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, Up):
                self._links.append(news.link)
                self._poller.register(news.link.socket, zmq.POLLIN)
            else:
                self._end(news, bitmask)

    def _end(self, news: Down, bitmask: NDArray[np.int32] | None) -> None:
        """An actor is gone: who had a matcher there is lost, who had none is placed again.

        Where it was ended because of one mask, only that mask's sequence is lost: the others' histories are known, and
        they are opened elsewhere.
        """
        link = news.link
        if link not in self._links:
            return
        self._receive(link, bitmask)  # what it answered before its end still counts
        self._links.remove(link)
        self._poller.unregister(link.socket)
        culprit = link.busy_with() if news.hung else None
        waiting = self._waiting()
        for sequence_id in link.sequences:
            sequence = self._sequences[sequence_id]
            if not sequence.sent or (news.hung and sequence_id != culprit):
                _displace(sequence)
                row = Row("needs_history")
            else:
                error = MaskTimeout(news.error.message) if sequence_id == culprit else news.error
                self._lose(sequence, error)
                row = Row("failed", error=sequence.error)
            for index in waiting.get(sequence_id, ()):
                self._step.decide(index, row)
        link.sequences.clear()
        link.close()

    def _lose(self, sequence: _Sequence, error: GuidedError) -> None:
        sequence.link = sequence.lease = None
        sequence.error = sequence.error or error
        self._lost[sequence.opening.sequence] = sequence.error

    def _waiting(self) -> dict[int, list[int]]:
        """The undecided rows of the current step, by sequence."""
        waiting: dict[int, list[int]] = {}
        for index, fill in enumerate(self._step.fills):
            if self._step.rows[index] is None:
                waiting.setdefault(fill.sequence_id, []).append(index)
        return waiting


def _displace(sequence: _Sequence) -> None:
    """Forget where a sequence was: it is placed again when it is next filled."""
    sequence.link = sequence.lease = None
    sequence.sent = sequence.confirmed = False


def _same(lease: Lease, fill: Fill) -> bool:
    """Whether `fill` asks for what `lease` was sent out for: nothing new, or the same tokens once more."""
    if lease.position != fill.start + len(fill.tokens):
        return False
    return not fill.tokens or (lease.start == fill.start and lease.tokens == list(fill.tokens))
