"""Link: the engine thread's end of one actor incarnation. Dies with it; the next incarnation gets another."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.channel import Channel
from actors.leases import Leases
from actors.segment import IDLE, Segment
from actors.supervision.process import ActorLocation
from guided.errors import BackendError, to_wire
from guided.messages import OpenSequence, RowResult, RowStatus, StepAnswer, decoder, encode

__all__ = ["Link", "Mailed", "Outbox", "Packed", "Wired"]

_decode = decoder(StepAnswer).decode


@dataclass(frozen=True, slots=True)
class Wired:
    """What a supervisor hands over when an incarnation is up."""

    index: int
    """Which of the pool's actors."""
    incarnation: int
    place: ActorLocation
    channel: Channel
    segment: Segment
    shared: bool
    installed: set[str]
    """Keys of the grammars it has; grows and shrinks while it lives."""


@dataclass(slots=True)
class Outbox:
    """The message that is being put together."""

    fills: list[tuple[int, int, int, Sequence[int]]] = field(default_factory=list)
    """`FillRow`s, as they travel."""
    indices: list[int] = field(default_factory=list)
    """Which row of the step each is."""
    opens: list[OpenSequence] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Mailed:
    """What a request asks for."""

    number: int
    rows: NDArray[np.intp]
    """Of the segment, in the order in which the worker fills them."""
    indices: NDArray[np.intp]
    """Of the step."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A request that is ready to go."""

    message: bytes
    mailed: Mailed
    frees: list[int]


class Link:
    """Sends requests, receives answers, keeps the leases of one incarnation. Used from the engine's thread only.

    But for `overdue`.
    """

    def __init__(self, wired: Wired) -> None:
        self.index = wired.index
        self.incarnation = wired.incarnation
        self.place = wired.place
        self.installed = wired.installed
        self.rows = wired.segment.rows
        """The worker's memory, where that is shared; else a copy of what it sent."""
        self.leases = Leases(self.rows)
        self.outbox = Outbox()
        self.sequences: set[int] = set()
        """Ids of the sequences that are placed here."""
        self.stragglers: set[int] = set()
        """Ids of the sequences that are here because they hold others up: it is a slow lane while there are any."""
        self.reserved_for: int | None = None
        """The only sequence that may be here: a suspect."""
        self.retiring = False
        """A fresh actor is to take its place: sequences go elsewhere where they can. Written by its supervisor."""
        self.closed = False
        self.shared = wired.shared
        self._moved_on = 0.0
        """`time.monotonic()` of its last answer in words, or of the first request since it had nothing to do."""
        self._owed_for = 0.0
        """Where memory isn't shared: seconds without an answer, though it owed one, when the engine last looked."""
        self._channel = wired.channel
        self._segment = wired.segment
        self._wanted, self._busy, self._since = (self.rows.mark[name] for name in ("wanted", "busy", "since"))
        self._mailed: deque[NDArray[np.intp]] = deque()
        """Where memory isn't shared: rows that answers are owed for, in the order in which the worker fills them."""

    @property
    def socket(self) -> Any:
        """To poll for answers."""
        return self._channel.socket

    @property
    def has_mail(self) -> bool:
        """Whether there is something to send."""
        outbox = self.outbox
        return bool(outbox.fills or outbox.frees)

    def free(self, sequence: int) -> None:
        """Put a free into the next message."""
        self.outbox.frees.append(sequence)

    def pack(self, number: int) -> Packed:
        """Encode the request that was put together, for `send`.

        Args:
            number: greater than that of any request before.
        """
        outbox, self.outbox = self.outbox, Outbox()
        # A StepRequest, as it travels.
        message = encode((self.incarnation, number, outbox.fills, outbox.opens, outbox.frees))
        rows = np.array([fill[1] for fill in outbox.fills], np.intp)
        return Packed(message, Mailed(number, rows, np.array(outbox.indices, np.intp)), outbox.frees)

    def send(self, packed: Packed, now: float) -> bool:
        """Send it; never blocks. False where it doesn't go out: the actor doesn't read, or is gone."""
        if not self._channel.send(packed.message):
            # What it was to free stays in the next message.
            self.outbox.frees = packed.frees + self.outbox.frees
            return False
        rows, number = packed.mailed.rows, packed.mailed.number
        if not self.shared:
            if not self._mailed:
                self._moved_on = now
            self._mailed.append(rows)
        self.leases.ask(rows, number, now)
        return True

    def receive(self) -> Iterator[RowResult]:
        """What was answered in words: rows that aren't ready. Those that are, are in `rows` then.

        Another incarnation's answers, those to anything but a row's newest request, and garbled ones are dropped.
        """
        while (message := self._channel.receive()) is not None:
            try:
                answer: StepAnswer = _decode(message)
            except msgspec.MsgspecError:
                continue
            if answer.incarnation != self.incarnation:
                continue
            self._moved_on = time.monotonic()
            for result in answer.results:
                if self._is_owed(result, answer.step):
                    if result.status is RowStatus.READY:
                        result = self._take_mask(result)
                    self.leases.answer(result.row)
                    if result.status is not RowStatus.READY:
                        yield result
        while self._mailed and not any(map(self.leases.owed, self._mailed[0].tolist())):
            self._mailed.popleft()
        self._owed_for = time.monotonic() - self._moved_on if self._mailed else 0.0

    def _is_owed(self, result: RowResult, number: int) -> bool:
        leases, row = self.leases, result.row
        if not 0 <= row < len(leases.owners) or leases.owners[row] != result.sequence:
            return False
        ready_in_words = self.shared and result.status is RowStatus.READY
        return leases.asked(row) == number and leases.owed(row) and not ready_in_words

    def _take_mask(self, result: RowResult) -> RowResult:
        if len(result.mask) != 4 * self._segment.name.words:
            error = to_wire(BackendError("the worker sent a mask of another size"))
            return msgspec.structs.replace(result, status=RowStatus.FAILED, error=error)
        self.rows.masks[result.row] = np.frombuffer(result.mask, np.int32)
        self.rows.seconds[result.row] = result.seconds
        return result

    def want(self) -> None:
        """Somebody waits: have the actor say so when it is through with what it has."""
        self._wanted[0] = 1
        self._channel.push()

    def overdue(self, seconds: float) -> bool:
        """Whether the actor owes an answer, and got nowhere for longer than `seconds`. From any thread.

        Without shared memory that is so as of when the engine last looked: what came while it was in a forward pass
        counts.
        """
        return self.stuck_for(time.monotonic()) > seconds if self.shared else self._owed_for > seconds

    def stuck_for(self, now: float) -> float:
        """Seconds that it has been at one row, or has not begun with what it owes; 0 where it owes nothing."""
        oldest = self.leases.oldest()
        if oldest == math.inf:
            return 0.0
        moved_on = float(self._since[0]) if self.shared else self._moved_on
        return max(0.0, now - max(moved_on, oldest))

    def is_prompt(self, now: float, seconds: float) -> bool:
        """Whether it has got somewhere within the last `seconds`, or owes nothing."""
        # The first is so nearly always, and takes a glance.
        return (self.shared and now - float(self._since[0]) <= seconds) or self.stuck_for(now) <= seconds

    def forgotten(self, now: float, seconds: float) -> list[int]:
        """Rows that were last asked for more than `seconds` ago, and that the actor doesn't seem to know of."""
        if self.shared and self._busy[0] != IDLE:
            return []
        return self.leases.unanswered(now - seconds)

    def busy_with(self) -> int | None:
        """The sequence whose row the actor is filling, or hangs in."""
        row = self._busy_row()
        return self.leases.owners[row] if row != IDLE and self.leases.owed(row) else None

    def in_its_hands(self) -> set[int]:
        """The sequences whose row the actor may have been filling when it was last heard of.

        Where memory is shared, the mark that it leaves says which: one, or none. Through TCP it may be any that it has
        not answered for: what is decided travels a moment later.
        """
        if self.shared:
            sequence = self.busy_with()
            return set() if sequence is None else {sequence}
        return {self.leases.owners[row] for row in self.leases.outstanding()}

    def _busy_row(self) -> int:
        if self.shared:
            return int(self._busy[0])
        owed = (row for rows in self._mailed for row in rows.tolist() if self.leases.owed(row))
        return next(owed, IDLE)

    def close(self) -> None:
        """Give up connection and memory. Idempotent."""
        self.closed = True
        self._channel.close()
        self._segment.close()
