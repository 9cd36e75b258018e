"""Link: the engine thread's end of one actor incarnation. Dies with it; the next incarnation gets another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from actors.channel import Channel
from actors.leases import Lease, Leases
from actors.mask_actor import Place
from actors.segment import IDLE, Segment
from guided.messages import OpenSequence, RowResult, StepAnswer, decoder, encode
from guided.pool import Fill

__all__ = ["Link", "Wired"]

_decode = decoder(StepAnswer).decode


@dataclass(frozen=True, slots=True)
class Wired:
    """What a supervisor hands over when an incarnation is up."""

    index: int
    """Which of the pool's actors."""
    incarnation: int
    place: Place
    channel: Channel
    segment: Segment
    shared: bool
    installed: set[str]
    """Keys of the grammars it has; grows and shrinks while it lives."""


@dataclass(slots=True)
class _Outbox:
    """The message that is being put together."""

    fills: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    """`FillRow`s, as they travel."""
    opens: list[OpenSequence] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)


class Link:
    """Sends steps, receives answers, keeps the leases of one incarnation. Used from the engine's thread only."""

    def __init__(self, wired: Wired) -> None:
        self.index = wired.index
        self.incarnation = wired.incarnation
        self.place = wired.place
        self.installed = wired.installed
        self.leases = Leases(wired.segment.name.rows)
        self.sequences: set[int] = set()
        """Ids of the sequences that are placed here."""
        self.waiting_since = 0.0
        """`time.monotonic()` of the oldest fill without an answer; 0 where there is none."""
        self.stragglers: set[int] = set()
        """Ids of the sequences that are here because they hold others up: it is a slow lane while there are any."""
        self.moved_on = 0.0
        """`time.monotonic()` of its last answer, or of the first fill since it had nothing to do."""
        self.owed_for = 0.0
        """Seconds without an answer, though it owes one, when last looked. Read by other threads."""
        self.reserved_for: int | None = None
        """The only sequence that may be here: a suspect."""
        self.retiring = False
        """A fresh actor is to take its place: sequences go elsewhere where they can. Written by its supervisor."""
        self.closed = False
        self._channel = wired.channel
        self._segment = wired.segment
        self._masks = wired.segment.rows
        self._shared = wired.shared
        self._outbox = _Outbox()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To poll for answers."""
        return self._channel.socket

    @property
    def has_mail(self) -> bool:
        """Whether there is something to send."""
        outbox = self._outbox
        return bool(outbox.fills or outbox.frees)

    def lend(self, fill: Fill, now: float, index: int, opening: OpenSequence | None = None) -> Lease | None:
        """Put a fill into the next message, with a row to write to; None where all rows are out.

        Args:
            index: which row of the step it is.
            opening: what opens its sequence, where that isn't known to be open there.
        """
        tokens = list(fill.tokens)
        lease = self.leases.take(fill.sequence_id, fill.start, tokens, now, index)
        if lease is None:
            return None
        outbox = self._outbox
        outbox.fills.append((lease.sequence, lease.row, lease.start, tokens))
        outbox.leases.append(lease)
        if opening is not None:
            outbox.opens.append(opening)
        return lease

    def free(self, sequence: int) -> None:
        """Put a free into the next message."""
        self._outbox.frees.append(sequence)

    def send(self, step: int) -> list[Lease]:
        """Send the message that was put together; never blocks.

        Returns:
            The leases of fills that didn't go out (the actor doesn't read, or is gone); none where all did.
        """
        outbox = self._outbox
        # A StepRequest, as it travels.
        message = encode((self.incarnation, self.leases.message, outbox.fills, outbox.opens, outbox.frees))
        if self._channel.send(message):
            self.leases.message += 1
            if not self.waiting_since:
                self.moved_on = time.monotonic()
            self._outbox = _Outbox()
            self._note_waiting()
            return []
        # What it was to free stays in the next message.
        self._outbox = _Outbox(frees=outbox.frees)
        for lease in outbox.leases:
            self.leases.unsent(lease)
        return outbox.leases

    def receive(self) -> Iterator[list[RowResult]]:
        """The answers that are there, message by message; another incarnation's, and garbled ones, are dropped."""
        while (message := self._channel.receive()) is not None:
            try:
                answer: StepAnswer = _decode(message)
            except msgspec.MsgspecError:
                continue
            if answer.incarnation == self.incarnation:
                self.moved_on = time.monotonic()
                self.leases.answered = answer.step
                yield answer.results
        self._note_waiting()

    @property
    def masks(self) -> NDArray[np.int32] | None:
        """int32 `[rows, words]`: what answered leases are read from; None where masks come with their answers."""
        return self._masks if self._shared else None

    def mask(self, lease: Lease) -> NDArray[np.int32] | None:
        """The mask of an answered lease, `[words]`, where it is; None where the answer holds no such mask."""
        if self._shared:
            row: NDArray[np.int32] = self._masks[lease.row]
            return row
        mask = lease.result.mask if lease.result is not None else b""
        return np.frombuffer(mask, np.int32) if len(mask) == 4 * self._segment.name.words else None

    def overdue(self, seconds: float) -> bool:
        """Whether the actor owes an answer, and gave none for longer than `seconds`.

        As of when the engine last looked: what came while it was in a forward pass counts.
        """
        return self.owed_for > seconds

    def stuck_for(self, now: float) -> float:
        """Seconds since it last answered, where it owes an answer; 0 where it doesn't."""
        return now - self.moved_on if self.waiting_since else 0.0

    def busy_with(self) -> int | None:
        """The sequence whose row the actor is filling, or hangs in."""
        row = int(self._segment.busy[0])
        lease = self.leases.lent(row) if self._shared else self.leases.oldest
        return lease.sequence if lease is not None else None

    def in_its_hands(self) -> set[int]:
        """The sequences whose row the actor may have been filling when it was last heard of.

        Where memory is shared, the mark that it leaves says which: one, or none. Through TCP it may be any that it has
        not answered for: what is decided travels a moment later.
        """
        if self._shared:
            lease = self.leases.lent(int(self._segment.busy[0]))
            return {lease.sequence} if lease is not None else set()
        return {lease.sequence for lease in self.leases.outstanding}

    def forgotten(self, now: float, seconds: float) -> list[Lease]:
        """Fills that were last asked for more than `seconds` ago, and that the actor doesn't seem to know of."""
        if self._shared and self._segment.busy[0] != IDLE:
            return []
        return [each for each in self.leases.outstanding if now - max(each.sent, each.asked_again) > seconds]

    def repeat(self, lease: Lease, now: float, opening: OpenSequence | None) -> None:
        """Ask for a fill once more, in the next message. The first answer, should it still come, is ignored."""
        lease.asked_again = now
        lease.message = self.leases.message
        self._outbox.fills.append((lease.sequence, lease.row, lease.start, lease.tokens))
        if opening is not None:
            self._outbox.opens.append(opening)

    def close(self) -> None:
        """Give up connection and memory. Idempotent."""
        self.closed = True
        self._channel.close()
        self._masks = self._masks[:0].copy()
        self._segment.close()

    def _note_waiting(self) -> None:
        oldest = self.leases.oldest
        if oldest is None:
            self.waiting_since = self.owed_for = 0.0
        else:
            self.waiting_since = oldest.sent
            self.owed_for = time.monotonic() - self.moved_on
