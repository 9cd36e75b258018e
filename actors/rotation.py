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
from typing import Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from actors.leases import NOBODY, Lease
from actors.link import Link
from actors.placed import Placed
from actors.step import Step
from actors.supervisor import Down, Up
from guided.errors import BackendError, GuidedError, PoolUnavailable, from_wire
from guided.messages import OpenSequence, RowStatus
from guided.pool import Fill, Grammar, Row

__all__ = ["Rotation"]

_SLOW_SECONDS = 0.001
"""A sequence whose last row took longer is filled after its neighbours."""
_STRAGGLE_SECONDS, _STRAGGLE_FACTOR = 0.03, 20.0
"""A mask that takes longer, and so many times longer than most, holds others up: its sequence goes to a slow lane."""
_LOAD_SECONDS = 0.02
"""How often it is looked whether an actor has a grammar by now that none had."""
_PROMPT_ROWS = 16
"""After so many rows that were no trouble a sequence is like any other again."""
_STATES: tuple[Literal["ready", "needs_history", "failed"], ...] = ("ready", "needs_history", "failed")
"""By `RowStatus`: a tuple, because hashing an enum's members costs more than all the rest of deciding a row."""


class Rotation:
    """Sequences on links, and the steps between them."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._sequences: dict[int, Placed] = {}
        self._lost: dict[int, GuidedError] = {}
        self._step = Step(())
        self._read: list[tuple[Link, Lease]] = []
        """Answered leases whose masks the caller reads where they are, until the next step."""
        self._number = 0
        self._news: deque[Up | Down] = deque()
        self._interrupted = False
        self._usual = 0.0
        """Seconds that most rows take, about."""
        self._uneven = False
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
        sequence = Placed(opening, None)
        if not self._place(sequence) and not self._links:
            raise PoolUnavailable("no mask worker is up")
        self._sequences[sequence_id] = sequence

    def free(self, sequence_ids: Collection[int]) -> None:
        """See `MaskPool.free`."""
        for sequence_id in sequence_ids:
            self._lost.pop(sequence_id, None)
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is None or sequence.link is None:
                continue
            self._withdraw(sequence)
        # With the next step's message; where there will be none, now.
        for link in self._links:
            if link.has_mail and not link.sequences:
                link.send(self._number)

    def submit(self, fills: Sequence[Fill]) -> None:
        """See `MaskPool.submit`."""
        self._give_back_read()
        self._abandon_step()
        self._take_news()
        if self._uneven:
            self._level()
        self._number += 1
        step = self._step = Step(fills)
        now = time.monotonic()
        sequences = self._sequences
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
            if left <= 0:
                break
            self._wait(left)
        if step.undecided and patience is not None:
            self._make_way()
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
        return sequence.link is not None or any(sequence.opening.grammar in link.installed for link in self._links)

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
            self._end(Down(link, error))
        for sequence in self._sequences.values():
            sequence.error = sequence.error or error

    # placing

    def _place(self, sequence: Placed) -> bool:
        """Put a sequence on its parent's actor, or on the one with the fewest; False where none can take it."""
        opening = sequence.opening
        parent = self._sequences.get(opening.parent) if opening.parent is not None else None
        link = parent.link if parent is not None else None
        if link is None:
            able = [link for link in self._links if opening.grammar in link.installed]
            if not able:
                return False
            # Where there are slow lanes, those who straggle go there and nobody else does.
            able = [link for link in able if bool(link.stragglers) == sequence.straggles] or able
            prompt = [link for link in able if self._is_prompt(link)] or able
            link = min(prompt, key=lambda link: len(link.sequences))
        if sequence.straggles:
            link.stragglers.add(opening.sequence)
        sequence.link = link
        link.sequences.add(opening.sequence)
        return True

    def _withdraw(self, sequence: Placed) -> None:
        """Take a sequence off its actor, which lives: it has no place then."""
        link, sequence_id = sequence.link, sequence.opening.sequence
        if link is None:
            return
        link.sequences.discard(sequence_id)
        if sequence_id in link.stragglers:
            link.stragglers.discard(sequence_id)
            self._uneven = not link.stragglers
        if sequence.lease is not None:
            link.leases.give_back(sequence.lease)
        if sequence.sent:
            link.free(sequence_id)
        sequence.displace()

    # sequences that hold others up

    def _make_way(self) -> None:
        """A mask deadline was missed: where one mask holds an actor up, get the others out of its way.

        They are opened again elsewhere, from their histories. The actor that is held up is a slow lane from now on,
        unless there are enough: then the straggler goes to one with its next mask.
        """
        stuck = [link for link in self._links if not self._is_prompt(link)]
        for link in stuck:
            culprit = link.busy_with()
            straggler = self._sequences.get(culprit) if culprit is not None else None
            if straggler is not None and straggler.link is link:
                straggler.prompt_rows = 0
                lanes = sum(bool(each.stragglers) for each in self._links)
                if link.stragglers or lanes < len(self._links) // 2:
                    link.stragglers.add(straggler.opening.sequence)
            if any(not each.stragglers for each in self._links if each not in stuck):
                self._clear(link, culprit)

    def _is_prompt(self, link: Link) -> bool:
        return link.stuck_for(time.monotonic()) <= max(_STRAGGLE_SECONDS, _STRAGGLE_FACTOR * self._usual)

    def _clear(self, link: Link, culprit: int | None) -> None:
        """Move all who don't straggle off an actor that is held up; who holds it up may be gone from it already."""
        waiting = self._step.waiting()
        for sequence_id in link.sequences - link.stragglers - {culprit}:
            neighbour = self._sequences[sequence_id]
            self._withdraw(neighbour)
            neighbour.opening = OpenSequence(sequence_id, neighbour.opening.grammar)  # not back to a parent
            for index in waiting.get(sequence_id, ()):
                self._step.decide(index, Row("needs_history"))

    def _level(self) -> None:
        """A slow lane is an actor like the others again: it takes sequences from the one that has the most."""
        self._uneven = False
        usual = [link for link in self._links if not link.stragglers]
        if not usual:
            return
        most = max(usual, key=lambda link: len(link.sequences))
        fewest = min(usual, key=lambda link: len(link.sequences))
        movable = [each for each in most.sequences if self._sequences[each].lease is None]
        for sequence_id in movable[: (len(most.sequences) - len(fewest.sequences)) // 2]:
            self._withdraw(self._sequences[sequence_id])

    # a step's way out

    def _fill(self, sequence: Placed, index: int, fill: Fill, now: float) -> None:
        step = self._step
        if sequence.error is not None:
            step.decide(index, Row("failed", error=sequence.error))
            return
        if sequence.prompt_rows >= 0:
            self._send_to_lane(sequence, fill)
        if sequence.link is None and not self._place(sequence):
            step.unplaced.append(index)
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
        lease = sequence.lease = link.lend(fill, now, index, None if sequence.confirmed else sequence.opening)
        if lease is None:
            step.decide(index, Row("late"))
        elif not sequence.sent:
            sequence.sent = True
            step.opening.append(sequence)

    def _send_to_lane(self, sequence: Placed, fill: Fill) -> None:
        """It straggles elsewhere, and there is a slow lane: go there, unless the mask it asks for is under way."""
        link = sequence.link
        if link is None or link.stragglers or sequence.asked(fill) is not None:
            return
        if any(each.stragglers for each in self._links):
            self._withdraw(sequence)

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
        if self._step.unplaced and self._links:
            seconds = min(seconds, _LOAD_SECONDS)
        happened = self._poller.poll(math.ceil(seconds * 1000))
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
                        sequence.error = from_wire(result.error)
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
            row.error = from_wire(result.error)
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

    def _note_straggler(self, sequence: Placed) -> None:
        limit = max(_STRAGGLE_SECONDS, _STRAGGLE_FACTOR * self._usual)
        sequence.prompt_rows = sequence.prompt_rows + 1 if sequence.seconds < limit else 0
        if sequence.prompt_rows >= _PROMPT_ROWS:
            sequence.prompt_rows = -1
            if sequence.link is not None:
                sequence.link.stragglers.discard(sequence.opening.sequence)
                self._uneven = not sequence.link.stragglers

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
            else:
                self._end(news)

    def _end(self, news: Down) -> None:
        """An actor is gone: who had a matcher there is lost, who had none is placed again.

        Where it was ended because of one mask, or of none, that mask's sequence is lost at the most: the others'
        histories are known, and they are opened elsewhere.
        """
        link = news.link
        if link not in self._links:
            return
        self._receive(link)  # what it answered before its end still counts
        self._links.remove(link)
        self._poller.unregister(link.socket)
        culprit = link.busy_with() if news.cause in ("hung", "memory") else None
        waiting = self._step.waiting()
        for sequence_id in link.sequences:
            sequence = self._sequences[sequence_id]
            if not sequence.sent or (news.cause != "died" and sequence_id != culprit):
                sequence.displace()
                row = Row("needs_history")
            else:
                self._lose(sequence, news.error)
                row = Row("failed", error=sequence.error)
            for index in waiting.get(sequence_id, ()):
                self._step.decide(index, row)
        link.sequences.clear()
        link.close()

    def _lose(self, sequence: Placed, error: GuidedError) -> None:
        sequence.link = sequence.lease = None
        sequence.error = sequence.error or error
        self._lost[sequence.opening.sequence] = sequence.error
