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

from actors.leases import NOBODY
from actors.link import Link, Mailed
from actors.placed import Ask, Placed
from actors.step import Part, Step
from actors.supervisor import Down, Up
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, from_wire
from guided.messages import OpenSequence
from guided.pool import Fill, Grammar, Row, StepMasks

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
"""By `RowStatus`."""
_LOOK_SECONDS = 0.001
"""How often it is looked for masks while they are waited for: not every one is announced."""


class Rotation:
    """Sequences on links, and the steps between them."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._sequences: dict[int, Placed] = {}
        self._lost: dict[int, GuidedError] = {}
        self._step = Step(())
        self._extra: list[tuple[Link, int]] = []
        """Rows that were lent for the last step only."""
        self._unusual: list[tuple[Link, int, Placed, bool]] = []
        """Of the fills that wait to be sent, those whose answers are news: where they go, their place there, whose they
        are, and whether that actor had heard of it."""
        self._serial = 0
        """Steps so far."""
        self._number = 0
        """Requests so far, to all actors."""
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
            if sequence is not None:
                self._withdraw(sequence)
        # With the next step's message; where there will be none, now.
        for link in self._links:
            if link.has_mail and not link.sequences:
                self._send_to(link)

    def submit(self, fills: Sequence[Fill]) -> None:
        """See `MaskPool.submit`."""
        self._finish_step()
        self._give_back_extra()
        self._take_news()
        if self._uneven:
            self._level()
        serial = self._serial = self._serial + 1
        self._step = Step(fills)
        sequences = self._sequences
        others: list[int] = []
        for index, fill in enumerate(fills):
            sequence = sequences.get(fill.sequence_id)
            if sequence is not None and sequence.usual and sequence.serial != serial:
                # What happens to nearly every row.
                sequence.serial = serial
                outbox = sequence.link.outbox  # type: ignore[union-attr]  # a usual one has a place
                outbox.fills.append((fill.sequence_id, sequence.row, fill.start, fill.tokens))
                outbox.indices.append(index)
            else:
                others.append(index)
        slow = self._fill_others(others) if others else []
        self._send()
        if slow:
            # In a message of their own: should one take long, its neighbours have been sent.
            for index in slow:
                self._fill(sequences[fills[index].sequence_id], index, fills[index])
            self._send()

    def _fill_others(self, indices: Sequence[int]) -> list[int]:
        """Fills that need a thought; returns those of sequences that are known to be slow, the slowest last."""
        step, slow = self._step, list[tuple[float, int]]()
        for index in indices:
            fill = step.fills[index]
            sequence = self._sequences.get(fill.sequence_id)
            if sequence is None:
                step.decide(index, Row("failed", error=BackendError(f"sequence {fill.sequence_id} is not open")))
            elif sequence.seconds > _SLOW_SECONDS:
                slow.append((sequence.seconds, index))
            else:
                self._fill(sequence, index, fill)
        return [index for _, index in sorted(slow)]

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> StepMasks:
        """See `MaskPool.collect`."""
        step = self._step
        if step.look():
            self._wait_for(step, timeout, patience)
        others = {**step.other, **{index: Row("late") for index in step.undecided()}}
        found = StepMasks(len(step.fills), [part.masks() for part in step.parts], others, step.seconds)
        self._finish_step()
        if bitmask is not None:
            found.copy_to(bitmask)
        return found

    def _wait_for(self, step: Step, timeout: float, patience: float | None) -> None:
        """Wait until a step is decided, for `timeout` seconds, or for `patience` once some of it is."""
        started = time.monotonic()
        last = started + timeout
        enough = last if patience is None else started + patience
        for link in self._links:
            self._receive(link)
        while True:
            for link in self._links:
                link.want()
            undecided = step.look()
            left = (enough if undecided < len(step.fills) else last) - time.monotonic()
            if not undecided or self._interrupted or left <= 0:
                break
            self._wait(min(left, _LOOK_SECONDS))
        if undecided and patience is not None:
            self._make_way()
            step.look()

    def settled(self, sequence_ids: Collection[int], timeout: float) -> list[int]:
        """See `MaskPool.settled`."""
        last = time.monotonic() + timeout
        self._take_news()
        for link in self._links:
            self._receive(link)
        self._make_way()
        while True:
            for link in self._links:
                link.want()
            found = [each for each in sequence_ids if self._is_settled(each)]
            left = last - time.monotonic()
            if found or self._interrupted or left <= 0:
                return found
            self._wait(min(left, _LOAD_SECONDS))

    def _is_settled(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.error is not None:
            return True
        if sequence.ask is not None and sequence.link is not None:
            return not sequence.link.leases.owed(sequence.row)
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
            self._end(Down(link, error, hung=False))
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
        if sequence.row != NOBODY:
            link.leases.give_back(sequence.row, watched=link.shared)
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
        movable = [each for each in most.sequences if self._sequences[each].ask is None]
        for sequence_id in movable[: (len(most.sequences) - len(fewest.sequences)) // 2]:
            self._withdraw(self._sequences[sequence_id])

    # a step's way out

    def _fill(self, sequence: Placed, index: int, fill: Fill) -> None:
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
        if sequence.serial == self._serial:
            row = self._take_row(link, sequence)
            if row != NOBODY:
                step.extra.append((link, row))
        else:
            sequence.serial = self._serial
            if sequence.ask is not None and sequence.ask.is_for(fill):
                mailed = Mailed(sequence.ask.number, np.array([sequence.row]), np.array([index]))
                step.parts.append(Part(link, mailed, step.fills, [(0, sequence)]))
                return
            if sequence.row != NOBODY and link.leases.owed(sequence.row):
                link.leases.give_back(sequence.row, watched=link.shared)
                sequence.row = NOBODY
            sequence.ask = None
            row = sequence.row = self._take_row(link, sequence) if sequence.row == NOBODY else sequence.row
        if row == NOBODY:
            step.decide(index, Row("late"))
            return
        outbox = link.outbox
        self._unusual.append((link, len(outbox.fills), sequence, sequence.sent))
        outbox.fills.append((fill.sequence_id, row, fill.start, fill.tokens))
        outbox.indices.append(index)
        if not sequence.confirmed:
            outbox.opens.append(sequence.opening)
        sequence.sent = True

    def _take_row(self, link: Link, sequence: Placed) -> int:
        """A row of the actor's; from a sequence that isn't in this step, where all are lent."""
        row = link.leases.take(sequence.opening.sequence)
        if row == NOBODY:
            for other in map(self._sequences.__getitem__, link.sequences):
                if other.serial != self._serial and other.row != NOBODY and link.leases.reclaim(other.row):
                    other.row, other.usual, other.ask = NOBODY, False, None
            row = link.leases.take(sequence.opening.sequence)
        return row

    def _send_to_lane(self, sequence: Placed, fill: Fill) -> None:
        """It straggles elsewhere, and there is a slow lane: go there, unless the mask it asks for is under way."""
        link = sequence.link
        if link is None or link.stragglers or (sequence.ask is not None and sequence.ask.is_for(fill)):
            return
        if any(each.stragglers for each in self._links):
            self._withdraw(sequence)

    def _send(self) -> None:
        for link in self._links:
            if link.has_mail:
                self._send_to(link)
        self._unusual.clear()

    def _send_to(self, link: Link) -> None:
        indices = link.outbox.indices
        unusual = [(place, sequence, sent) for each, place, sequence, sent in self._unusual if each is link]
        self._number += 1
        mailed = link.send(self._number, time.monotonic())
        if mailed is None:
            # It doesn't read, or is going: these fills are asked for again, of whoever is there then.
            for _, sequence, sent in unusual:
                sequence.sent = sent
            for index in indices:
                self._step.decide(index, Row("late"))
        elif indices:
            news = [(place, sequence) for place, sequence, _ in unusual]
            self._step.parts.append(Part(link, mailed, self._step.fills, news))

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
            sequence = self._sequences[fill.sequence_id]
            self._fill(sequence, index, fill)
        self._send()

    def _receive(self, link: Link) -> None:
        """Take the answers that are there in words."""
        for result in link.receive():
            sequence = self._sequences.get(result.sequence)
            row = Row(_STATES[result.status], result.seconds, from_wire(result.error) if result.error else None)
            if sequence is not None and sequence.link is link:
                sequence.usual = sequence.confirmed = False  # should it lack the matcher, it is told to open one
                sequence.error = row.error
                if sequence.row == result.row:
                    sequence.ask = None
            for part in self._step.parts:
                if part.link is link:
                    for place in np.flatnonzero(part.rows == result.row).tolist():
                        self._step.decide(int(part.indices[place]), row)

    def _finish_step(self) -> None:
        """Nobody waits any more: what is late is kept for when its sequence asks again."""
        step, self._step = self._step, Step(())
        for part in step.parts:
            self._note(part)
        self._extra += step.extra

    def _give_back_extra(self) -> None:
        """Nobody looks at the masks of the last step any more."""
        extra, self._extra = self._extra, []
        for link, row in extra:
            link.leases.give_back(row, watched=link.shared)
        for link in self._links:
            link.leases.renew()

    def _note(self, part: Part) -> None:
        """Learn from a part of a step that is over: who is slow, who is late, who is usual from now on."""
        seconds = part.seconds
        for place, sequence in part.unusual:
            if part.ready[place] and sequence.link is part.link:
                self._answered(sequence, float(seconds[place]))
        if part.left:
            for place in part.undecided().tolist():
                self._keep(part, place)
            seconds = seconds[part.ready]
        elif part.open is not None:
            seconds = seconds[part.ready]
        if not len(seconds):
            return
        self._usual += 0.02 * (min(float(seconds[len(seconds) // 2]), 4 * self._usual + 0.0001) - self._usual)
        if seconds.max() > _SLOW_SECONDS:
            for place in np.flatnonzero(part.ready & (part.seconds > _SLOW_SECONDS)).tolist():
                slow = self._sequences.get(self._owner(part, place))
                if slow is not None:
                    slow.seconds, slow.usual = float(part.seconds[place]), False

    def _answered(self, sequence: Placed, seconds: float) -> None:
        sequence.confirmed = True
        sequence.ask = None
        sequence.seconds = seconds
        if sequence.prompt_rows >= 0:
            self._note_straggler(sequence)
        sequence.usual = sequence.prompt_rows < 0 and seconds <= _SLOW_SECONDS and sequence.row != NOBODY

    def _keep(self, part: Part, place: int) -> None:
        """It is late: should its sequence ask for the same again, the answer may be there."""
        sequence = self._sequences.get(self._owner(part, place))
        if sequence is not None and sequence.link is part.link and sequence.row == part.rows[place]:
            sequence.usual = False
            sequence.ask = Ask(part.number, part.fill(place))

    def _owner(self, part: Part, place: int) -> int:
        return part.fill(place).sequence_id

    def _note_straggler(self, sequence: Placed) -> None:
        limit = max(_STRAGGLE_SECONDS, _STRAGGLE_FACTOR * self._usual)
        sequence.prompt_rows = sequence.prompt_rows + 1 if sequence.seconds < limit else 0
        if sequence.prompt_rows >= _PROMPT_ROWS:
            sequence.prompt_rows = -1
            if sequence.link is not None:
                sequence.link.stragglers.discard(sequence.opening.sequence)
                self._uneven = not sequence.link.stragglers

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

        Where it was ended because of one mask, only that mask's sequence is lost: the others' histories are known, and
        they are opened elsewhere.
        """
        link = news.link
        if link not in self._links:
            return
        self._receive(link)  # what it answered before its end still counts
        self._step.look()
        self._links.remove(link)
        self._poller.unregister(link.socket)
        culprit = link.busy_with() if news.hung else None
        waiting = self._step.waiting()
        for sequence_id in link.sequences:
            sequence = self._sequences[sequence_id]
            if not sequence.sent or (news.hung and sequence_id != culprit):
                sequence.displace()
                row = Row("needs_history")
            else:
                error = MaskTimeout(news.error.message) if sequence_id == culprit else news.error
                self._lose(sequence, error)
                row = Row("failed", error=sequence.error)
            for index in waiting.get(sequence_id, ()):
                self._step.decide(index, row)
        for index in self._step.undecided(link):
            self._step.decide(index, Row("failed", error=news.error))  # of a sequence that was freed
        link.sequences.clear()
        link.close()

    def _lose(self, sequence: Placed, error: GuidedError) -> None:
        sequence.displace()
        sequence.error = sequence.error or error
        self._lost[sequence.opening.sequence] = sequence.error
