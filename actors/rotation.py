"""Rotation: the step that is under way, with the actors that are up.

All of it belongs to the engine's thread. Supervisors announce what comes and goes (`announce`, from any thread); it
takes effect at the next call, and at once in a `collect` that waits.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from actors.leases import NOBODY, Lease
from actors.link import Link
from actors.placed import Placed
from actors.placement import Placement
from actors.step import Step
from actors.supervisor import Down, Retiring, Up
from actors.verdict import Verdict
from guided.errors import BackendError, GuidedError, PoolUnavailable, from_wire
from guided.messages import OpenSequence, RowResult, RowStatus
from guided.pool import Fill, Grammar, Row

__all__ = ["Rotation"]

_SLOW_SECONDS = 0.001
"""A sequence whose last row took longer is filled after its neighbours."""
_STRAGGLE_SECONDS, _STRAGGLE_FACTOR = 0.03, 20.0
"""A mask that takes longer, and so many times longer than most, holds others up: its sequence goes to a slow lane."""
_LOAD_SECONDS = 0.02
"""How often it is looked whether an actor has a grammar by now that none had."""
_REPEAT_SECONDS = 1.0
"""An actor that has nothing to do, and hasn't answered for so long, is asked again."""
_PROMPT_ROWS = 16
"""After so many rows that were no trouble a sequence is like any other again."""
_STATES: tuple[Literal["ready", "needs_history", "failed"], ...] = ("ready", "needs_history", "failed")
"""By `RowStatus`: a tuple, because hashing an enum's members costs more than all the rest of deciding a row."""


class Rotation:
    """Sequences on links, and the steps between them.

    Args:
        mask_limit: seconds that a mask may take; its supervisor ends the actor then. A fill that the actor doesn't seem
            to know of is asked for again long before.
        pool_wait: seconds that a sequence waits for an actor, before it fails with `PoolUnavailable`.
        max_replays: see `Verdict`.
        refused: why grammars are loaded by no actor any more, by their keys; grows while this lives.
    """

    def __init__(
        self,
        mask_limit: float = 5.0,
        pool_wait: float = 30.0,
        max_replays: int = 0,
        refused: Mapping[str, GuidedError] | None = None,
    ) -> None:
        self._repeat_after = min(_REPEAT_SECONDS, mask_limit / 4)
        self._pool_wait = pool_wait
        self._max_replays = max_replays
        self._refused = {} if refused is None else refused
        self._placement = Placement()
        self._links = self._placement.links
        self._sequences = self._placement.sequences
        self._lost: dict[int, GuidedError] = {}
        self._step = Step(())
        self._read: list[tuple[Link, Lease]] = []
        """Answered leases whose masks the caller reads where they are, until the next step."""
        self._number = 0
        self._news: deque[Up | Retiring | Down] = deque()
        self._interrupted = False
        self._usual = 0.0
        """Seconds that most rows take, about."""
        self._closed = False
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not before nobody can write to it any more.
        weakref.finalize(self, os.close, self._wake)
        self._poller.register(self._wake, zmq.POLLIN)

    def announce(self, news: Up | Retiring | Down) -> None:
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
        if self._closed:
            raise PoolUnavailable("the pool is shut down")
        sequence = Placed(OpenSequence(sequence_id, grammar.key, parent_id), None)
        self._placement.place(sequence, self._prompt_seconds, time.monotonic())  # else when it is filled
        self._sequences[sequence_id] = sequence

    def free(self, sequence_ids: Collection[int]) -> None:
        """See `MaskPool.free`."""
        for sequence_id in sequence_ids:
            self._lost.pop(sequence_id, None)
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._placement.withdraw(sequence)
        # With the next step's message; where there will be none, now.
        for link in self._links:
            if link.has_mail and not link.sequences:
                link.send(self._number)

    def submit(self, fills: Sequence[Fill]) -> None:
        """See `MaskPool.submit`."""
        self._give_back_read()
        self._abandon_step()
        self._take_news()
        if self._placement.uneven:
            self._placement.level()
        self._number += 1
        step = self._step = Step(fills)
        now = time.monotonic()
        sequences = self._sequences
        if self._placement.suspects:
            self._isolate_suspects(now)
        slow: list[tuple[float, int]] = []
        for index, fill in enumerate(fills):
            sequence = sequences.get(fill.sequence_id)
            if sequence is None:
                step.decide(index, Row("failed", error=BackendError(f"sequence {fill.sequence_id} is not open")))
            elif sequence.seconds > _SLOW_SECONDS:
                slow.append((sequence.seconds, index))
            elif (
                sequence.confirmed
                and sequence.lease is None
                and sequence.error is None
                and sequence.prompt_rows < 0
                and sequence.link is not None
            ):
                # What happens to nearly every row, and what `_fill` would do.
                lease = sequence.lease = sequence.link.lend(fill, now, index)
                if lease is None:
                    step.decide(index, Row("late"))
            else:
                self._fill(sequence, index, fill, now)
        self._send()
        if slow:
            # In a message of their own: their neighbours' answers don't wait, though a library that holds the
            # interpreter's lock keeps the actor from sending while it fills.
            for _, index in sorted(slow):
                self._fill(sequences[fills[index].sequence_id], index, fills[index], now)
            self._send()

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> list[Row]:
        """See `MaskPool.collect`."""
        step = self._step
        step.collecting, step.bitmask = True, bitmask
        started = time.monotonic()
        last = started + timeout
        enough = last if patience is None else started + patience
        for link, lease in step.answered:
            self._settle(link, lease)
        for link in self._links:
            self._receive(link)
        while step.undecided and not self._interrupted:
            left = (enough if step.undecided < len(step.rows) else last) - time.monotonic()
            if not self._links:
                left = min(left, started + _LOAD_SECONDS - time.monotonic())  # there is nothing to wait for
            if left <= 0:
                break
            self._wait(left)
        if step.undecided and patience is not None:
            self._make_way()
        for index in step.unplaced:
            step.decide(index, Row("unplaced"))
        self._abandon_step()
        return [row or Row("late") for row in step.rows]

    def settled(self, sequence_ids: Collection[int], timeout: float) -> list[int]:
        """See `MaskPool.settled`."""
        last = time.monotonic() + timeout
        self._take_news()
        for link in self._links:
            self._receive(link)
        self._make_way()
        while not (found := [each for each in sequence_ids if self._is_settled(each)]) and not self._interrupted:
            left = last - time.monotonic()
            if left <= 0:
                break
            self._wait(min(left, _LOAD_SECONDS) if self._links else left)
        return found

    def _is_settled(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.error is not None:
            return True
        if sequence.lease is not None:
            return sequence.lease.result is not None
        now = time.monotonic()
        return (
            sequence.link is not None
            or self._placement.can_place(sequence, now)
            or self._why_not_wait(sequence, now) is not None
        )

    def failures(self) -> dict[int, GuidedError]:
        """See `MaskPool.failures`."""
        self._take_news()
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """Give up all connections and memory; everything that is still open is lost."""
        self._take_news()
        self._closed = True
        error = PoolUnavailable("the pool is shut down")
        for link in list(self._links):
            self._end(Down(link, error))
        for sequence in self._sequences.values():
            sequence.error = sequence.error or error

    # a step's way out

    def _fill(self, sequence: Placed, index: int, fill: Fill, now: float) -> None:
        step = self._step
        if sequence.error is not None:
            step.decide(index, Row("failed", error=sequence.error))
            return
        if sequence.prompt_rows >= 0 and sequence.asked(fill) is None:
            self._placement.to_lane(sequence)
        if sequence.link is None and not self._find_place(sequence, index, now):
            return
        link = sequence.link
        assert link is not None
        lease = sequence.lease
        if lease is not None:
            if lease.index == NOBODY and sequence.asked(fill) is not None:
                lease.index = index
                if lease.result is not None:
                    step.answered.append((link, lease))
                return
            if lease.index == NOBODY:
                link.leases.give_back(lease)
        if fill.start and sequence.displaced and not sequence.sent:
            step.decide(index, Row("unplaced"))  # the actor would ask for its history
            return
        lease = sequence.lease = link.lend(fill, now, index, None if sequence.confirmed else sequence.opening)
        if lease is None:
            step.decide(index, Row("late"))
        elif not sequence.sent:
            sequence.sent = True
            step.opening.append(sequence)

    def _find_place(self, sequence: Placed, index: int, now: float) -> bool:
        """Place a sequence. False where it has to wait for an actor, or to give that up: then its row is seen to."""
        if sequence.suspect:
            placed = self._placement.isolate(sequence, now)
        else:
            placed = self._placement.place(sequence, self._prompt_seconds, now)
        if placed:
            return True
        sequence.waiting_since = sequence.waiting_since or now
        error = self._why_not_wait(sequence, now)
        if error is None:
            self._step.unplaced.append(index)
        else:
            self._lose(sequence, error)
            self._step.decide(index, Row("failed", error=error))
        return False

    def _why_not_wait(self, sequence: Placed, now: float) -> GuidedError | None:
        """What a sequence that no actor can take fails with, where it has waited long enough or would wait in vain."""
        refusal = self._refused.get(sequence.opening.grammar)
        if refusal is None and sequence.waiting_since and now - sequence.waiting_since >= self._pool_wait:
            refusal = PoolUnavailable(f"no mask worker was there for it for {self._pool_wait:g} s")
        return refusal

    def _isolate_suspects(self, now: float) -> None:
        """Before anybody else gets a place in this step."""
        self._placement.clear_suspects()
        for sequence_id in self._placement.suspects.intersection(fill.sequence_id for fill in self._step.fills):
            self._placement.isolate(self._sequences[sequence_id], now)

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

    def _wait(self, seconds: float) -> None:
        """Wait for answers or news, and deal with them."""
        seconds = min(seconds, self._repeat_after)
        if self._step.unplaced and self._links:
            seconds = min(seconds, _LOAD_SECONDS)
        happened = self._poller.poll(math.ceil(seconds * 1000))
        if not happened:
            self._ask_again(time.monotonic())
        sockets = {socket for socket, _ in happened}
        for link in list(self._links):
            if link.socket in sockets:
                self._receive(link)
        if self._wake in sockets:
            os.eventfd_read(self._wake)
            self._take_news()
        if self._step.unplaced:
            self._send_unplaced()

    def _send_unplaced(self) -> None:
        step = self._step
        self._placement.clear_suspects()
        waiting, step.unplaced = step.unplaced, []
        for index in waiting:
            fill = step.fills[index]
            self._fill(self._sequences[fill.sequence_id], index, fill, time.monotonic())
        self._send()

    def _receive(self, link: Link) -> None:
        """Take the answers that are there."""
        answer = link.leases.answer
        step, sequences, masks = self._step, self._sequences, link.masks
        rows, ready, read = step.rows, RowStatus.READY, self._read
        in_place = step.collecting and step.bitmask is None and masks is not None
        for results in link.receive():
            if results:
                seconds = results[len(results) // 2].seconds
                self._usual += 0.02 * (min(seconds, 4 * self._usual + 0.0001) - self._usual)
            for result in results:
                lease = answer(result)
                if lease is None:
                    continue
                sequence = sequences.get(lease.sequence)
                if sequence is not None:
                    sequence.confirmed = True
                    sequence.seconds = result.seconds
                    if sequence.prompt_rows >= 0:
                        self._note_straggler(sequence)
                    if result.error is not None:
                        sequence.error = _error(link, result)
                index = lease.index
                if index == NOBODY:
                    continue
                if in_place and result.status is ready and rows[index] is None and sequence is not None:
                    # What happens to nearly every row, and what `_settle` would do.
                    rows[index] = Row("ready", result.seconds, None, masks[lease.row])  # type: ignore[index]
                    step.undecided -= 1
                    read.append((link, lease))
                    if sequence.lease is lease:
                        sequence.lease = None
                elif step.collecting:
                    self._settle(link, lease)
                else:
                    step.answered.append((link, lease))

    def _settle(self, link: Link, lease: Lease) -> None:
        """An answered lease that the current step waits for: decide its row; give its place back when that was read."""
        result, bitmask = lease.result, self._step.bitmask
        if result is None or lease.index == NOBODY or link.closed:
            return
        row = Row(_STATES[result.status], result.seconds)
        if result.status is RowStatus.READY:
            mask = link.mask(lease)
            if mask is None:
                row = Row("failed", result.seconds, BackendError("the worker sent a mask of another size"))
            elif bitmask is None:
                row.mask = mask
            else:
                bitmask[lease.index] = mask
        elif result.error is not None:
            row.error = _error(link, result)
        self._step.decide(lease.index, row)
        if row.mask is None:
            link.leases.give_back(lease)
        else:
            self._read.append((link, lease))
        sequence = self._sequences.get(lease.sequence)
        if sequence is not None and sequence.lease is lease:
            sequence.lease = None

    def _give_back_read(self) -> None:
        """Nobody looks at the masks of the last step any more."""
        read, self._read = self._read, []
        for link, lease in read:
            link.leases.give_back(lease)

    def _make_way(self) -> None:
        """Rows are late: see that nobody waits behind a slow one, and that nothing got lost."""
        now = time.monotonic()
        waiting = self._step.waiting()
        for sequence_id in self._placement.make_way(self._prompt_seconds, now):
            for index in waiting.get(sequence_id, ()):
                self._step.decide(index, Row("unplaced"))
        self._ask_again(now)

    def _ask_again(self, now: float) -> None:
        """For what an actor that has nothing to do owes: the request or its answer got lost."""
        for link in self._links:
            for lease in link.forgotten(now, self._repeat_after):
                sequence = self._sequences.get(lease.sequence)
                link.repeat(lease, now, None if sequence is None or sequence.confirmed else sequence.opening)
            if link.has_mail:
                link.send(self._number)

    @property
    def _prompt_seconds(self) -> float:
        """What takes longer holds others up."""
        return max(_STRAGGLE_SECONDS, _STRAGGLE_FACTOR * self._usual)

    def _note_straggler(self, sequence: Placed) -> None:
        sequence.prompt_rows = sequence.prompt_rows + 1 if sequence.seconds < self._prompt_seconds else 0
        if sequence.prompt_rows >= _PROMPT_ROWS:
            sequence.prompt_rows = -1
            if sequence.link is not None:
                sequence.link.stragglers.discard(sequence.opening.sequence)
                self._placement.uneven = not sequence.link.stragglers

    def _abandon_step(self) -> None:
        """Nobody waits any more: what is late is kept for when its sequence asks again."""
        step, self._step = self._step, Step(())
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

    def _take_news(self) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, Up):
                self._links.append(news.link)
                self._poller.register(news.link.socket, zmq.POLLIN)
                self._placement.uneven |= any(link.retiring for link in self._links)
            elif isinstance(news, Retiring):
                self._placement.uneven = True
            else:
                self._end(news)

    def _end(self, news: Down) -> None:
        """An actor is gone: some of who was there are lost, the others are placed again (`Verdict`)."""
        link = news.link
        if link not in self._links:
            return
        self._receive(link)  # what it answered before its end still counts
        self._poller.unregister(link.socket)
        verdict = Verdict.on(news, self._max_replays)
        waiting = self._step.waiting()
        for sequence in self._placement.remove(link):
            if self._closed or verdict.is_lost(sequence):
                self._lose(sequence, verdict.error(sequence))
                row = Row("failed", error=sequence.error)
            else:
                sequence.displace()
                if sequence.suspect:
                    self._placement.suspects.add(sequence.opening.sequence)
                row = Row("unplaced")
            for index in waiting.get(sequence.opening.sequence, ()):
                self._step.decide(index, row)
        link.sequences.clear()
        link.close()

    def _lose(self, sequence: Placed, error: GuidedError) -> None:
        sequence.link = sequence.lease = None
        sequence.error = sequence.error or error
        self._lost[sequence.opening.sequence] = sequence.error


def _error(link: Link, result: RowResult) -> GuidedError:
    """A row's error, with a note of whose it is: for the log."""
    assert result.error is not None
    error = from_wire(result.error)
    error.add_note(f"on mask worker {link.index}, pid {link.place.pid}")
    return error
