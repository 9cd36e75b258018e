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
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from actors.leases import NOBODY
from actors.link import Link, Mailed, Packed
from actors.placed import Ask, Placed
from actors.placement import Placement
from actors.step import Part, Step
from actors.supervision.supervisor import WorkerDown, WorkerRetiring, WorkerUp
from actors.verdict import Verdict
from guided.errors import BackendError, GuidedError, PoolUnavailable, from_wire
from guided.messages import OpenSequence, RowResult
from guided.pool import Fill, Grammar, Row, StepMasks

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
"""By `RowStatus`."""
_LOOK_SECONDS = 0.001
"""How often it is looked for masks while they are waited for: not every one is announced."""


class Rotation:
    """Sequences on links, and the steps between them.

    Args:
        mask_limit: seconds that a mask may take; its supervisor ends the actor then. A fill that the actor doesn't seem
            to know of is asked for again long before.
        pool_wait: seconds that a sequence waits for an actor, before it fails with `PoolUnavailable`.
        max_replays: see `Verdict`.
        rejection_of: why no worker loads the grammar with a given key any more; None where workers may load it.
    """

    def __init__(
        self,
        mask_limit: float = 5.0,
        pool_wait: float = 30.0,
        max_replays: int = 0,
        rejection_of: Callable[[str], GuidedError | None] = lambda key: None,
    ) -> None:
        self._repeat_after = min(_REPEAT_SECONDS, mask_limit / 4)
        self._pool_wait = pool_wait
        self._max_replays = max_replays
        self._rejection_of = rejection_of
        self._placement = Placement()
        self._links = self._placement.links
        self._sequences = self._placement.sequences
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
        self._news: deque[WorkerUp | WorkerRetiring | WorkerDown] = deque()
        self._interrupted = False
        self._usual = 0.0
        """Seconds that most rows take, about."""
        self._closed = False
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not before nobody can write to it any more.
        weakref.finalize(self, os.close, self._wake)
        self._poller.register(self._wake, zmq.POLLIN)

    def announce(self, news: WorkerUp | WorkerRetiring | WorkerDown) -> None:
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
                self._send_to([link])

    def submit(self, fills: Sequence[Fill]) -> None:
        """See `MaskPool.submit`."""
        self._finish_step()
        self._give_back_extra()
        self._take_news()
        if self._placement.uneven:
            self._placement.level()
        serial = self._serial = self._serial + 1
        self._step = Step(fills)
        if self._placement.suspects:
            self._isolate_suspects(time.monotonic())
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
        for index in list(step.unplaced):
            step.decide(index, Row("unplaced"))
        others = {**step.other, **{index: Row("late") for index in step.undecided()}}
        found = StepMasks(len(step.fills), [part.masks() for part in step.parts], others, self._finish_step())
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
            if not self._links:
                left = min(left, started + _LOAD_SECONDS - time.monotonic())  # there is nothing to wait for
            if (
                not undecided
                or self._interrupted
                or left <= 0
                or (patience is not None and self._vain(step, undecided))
            ):
                break
            self._wait(min(left, _LOOK_SECONDS))
        if undecided and patience is not None:
            self._make_way()
            step.look()

    def _vain(self, step: Step, undecided: int) -> bool:
        """Whether only rows of stragglers are missing, which nobody waits for: the deadline would be missed anyway."""
        if undecided == len(step.fills) or not any(link.stragglers for link in self._links):
            return False
        missing = (self._sequences.get(step.fills[index].sequence_id) for index in step.undecided())
        return all(sequence is not None and sequence.straggles for sequence in missing)

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
            self._wait(min(left, _LOAD_SECONDS) if self._links else left)

    def _is_settled(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.error is not None:
            return True
        if sequence.ask is not None and sequence.link is not None:
            return not sequence.link.leases.owed(sequence.row)
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
            self._end(WorkerDown(link, error))
        for sequence in self._sequences.values():
            sequence.error = sequence.error or error

    # a step's way out

    def _fill(self, sequence: Placed, index: int, fill: Fill) -> None:
        step = self._step
        if sequence.error is not None:
            step.decide(index, Row("failed", error=sequence.error))
            return
        if sequence.prompt_rows >= 0 and not (sequence.ask is not None and sequence.ask.is_for(fill)):
            self._placement.to_lane(sequence)
        if sequence.link is None and not self._find_place(sequence, index, time.monotonic()):
            return
        link = sequence.link
        assert link is not None
        if sequence.serial == self._serial:
            row = self._take_row(link, sequence)
            if row != NOBODY:
                step.extra.append((link, row))
        else:
            if fill.start and sequence.displaced and not sequence.sent:
                step.decide(index, Row("unplaced"))  # the actor would ask for its history
                return
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
        else:
            self._mail(link, sequence, row, index, fill)

    def _mail(self, link: Link, sequence: Placed, row: int, index: int, fill: Fill) -> None:
        """Put a fill into an actor's next message, and what opens its sequence where that isn't known to be open."""
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
        refusal = self._rejection_of(sequence.opening.grammar)
        if refusal is None and sequence.waiting_since and now - sequence.waiting_since >= self._pool_wait:
            refusal = PoolUnavailable(f"no mask worker was there for it for {self._pool_wait:g} s")
        return refusal

    def _isolate_suspects(self, now: float) -> None:
        """Before anybody else gets a place in this step."""
        self._placement.clear_suspects()
        for sequence_id in self._placement.suspects.intersection(fill.sequence_id for fill in self._step.fills):
            self._placement.isolate(self._sequences[sequence_id], now)

    def _send(self) -> None:
        self._send_to([link for link in self._links if link.has_mail])
        self._unusual.clear()

    def _send_to(self, links: Collection[Link]) -> None:
        packed: list[tuple[Link, Packed]] = []
        for link in links:
            self._number += 1
            packed.append((link, link.pack(self._number)))
        now = time.monotonic()
        # Nothing is done between these: an actor that wakes up may have this CPU for milliseconds.
        sent = [link.send(each, now) for link, each in packed]
        for (link, each), went in zip(packed, sent, strict=True):
            if not went:
                self._not_sent(link, each)
            elif len(each.mailed.indices):
                news = [(place, sequence) for other, place, sequence, _ in self._unusual if other is link]
                self._step.parts.append(Part(link, each.mailed, self._step.fills, news))

    def _not_sent(self, link: Link, packed: Packed) -> None:
        """It doesn't read, or is going: these fills are asked for again, of whoever is there then."""
        for other, _, sequence, sent in self._unusual:
            if other is link:
                sequence.sent = sent
        for index in packed.mailed.indices.tolist():
            self._step.decide(index, Row("late"))

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
            self._fill(self._sequences[fill.sequence_id], index, fill)
        self._send()

    def _receive(self, link: Link) -> None:
        """Take the answers that are there in words."""
        for result in link.receive():
            sequence = self._sequences.get(result.sequence)
            row = Row(_STATES[result.status], result.seconds, _error(link, result) if result.error else None)
            if sequence is not None and sequence.link is link:
                sequence.usual = sequence.confirmed = False  # should it lack the matcher, it is told to open one
                sequence.error = row.error
                if sequence.row == result.row:
                    sequence.ask = None
            for part in self._step.parts:
                if part.link is link:
                    for place in np.flatnonzero(part.rows == result.row).tolist():
                        self._step.decide(int(part.indices[place]), row)

    def _finish_step(self) -> float:
        """Nobody waits any more: what is late is kept for when its sequence asks again.

        Returns:
            What the workers spent on what is ready, seconds.
        """
        step, self._step = self._step, Step(())
        self._extra += step.extra
        return sum(map(self._note, step.parts))

    def _give_back_extra(self) -> None:
        """Nobody looks at the masks of the last step any more."""
        extra, self._extra = self._extra, []
        for link, row in extra:
            link.leases.give_back(row, watched=link.shared)
        for link in self._links:
            link.leases.renew()

    def _note(self, part: Part) -> float:
        """Learn from a part of a step that is over: who is slow, who is late, who is usual from now on.

        Returns:
            What the worker spent on what is ready of it, seconds.
        """
        seconds: list[float] = part.seconds.tolist()
        for place, sequence in part.unusual:
            if part.ready[place] and sequence.link is part.link:
                self._answered(sequence, seconds[place])
        if part.left:
            for place in part.undecided().tolist():
                self._keep(part, place)
        if part.left or part.open is not None:
            seconds = [each if ready else 0.0 for each, ready in zip(seconds, part.ready.tolist(), strict=True)]
        typical = seconds[len(seconds) // 2]
        if typical:
            self._usual += 0.02 * (min(typical, 4 * self._usual + 0.0001) - self._usual)
        if max(seconds) > _SLOW_SECONDS:
            for place, each in enumerate(seconds):
                slow = self._sequences.get(self._owner(part, place)) if each > _SLOW_SECONDS else None
                if slow is not None:
                    slow.seconds, slow.usual = each, False
        return sum(seconds)

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
            rows = link.forgotten(now, self._repeat_after)
            if rows:
                since = link.leases.since(rows)
                current = self._repeat_current(link, rows)
                self._repeat_kept(link, [row for row in rows if row not in current])
                link.leases.repeated(rows, since, now)

    def _repeat_current(self, link: Link, rows: Collection[int]) -> set[int]:
        """Those that the current step waits for; returns them."""
        repeated: set[int] = set()
        for part in [part for part in self._step.parts if part.link is link]:
            for place in part.undecided().tolist():
                row, fill, index = int(part.rows[place]), part.fill(place), int(part.indices[place])
                sequence = self._sequences.get(fill.sequence_id)
                if row in rows and sequence is not None and sequence.link is link:
                    part.give_up(place)
                    self._mail(link, sequence, row, index, fill)
                    repeated.add(row)
        if link.has_mail:
            self._send()
        return repeated

    def _repeat_kept(self, link: Link, rows: Collection[int]) -> None:
        """Those that were late, and those of sequences that were freed: such a row is free once the actor says so."""
        if not rows:
            return
        asking: list[tuple[Placed, Fill]] = []
        for row in rows:
            owner = link.leases.owners[row]
            sequence, fill = self._sequences.get(owner), Fill(owner, 0, [])
            if sequence is not None and sequence.link is link and sequence.row == row and sequence.ask is not None:
                fill = sequence.ask.fill
                asking.append((sequence, fill))
                if not sequence.confirmed:
                    link.outbox.opens.append(sequence.opening)
            link.outbox.fills.append((owner, row, fill.start, fill.tokens))
        self._send_to([link])
        for sequence, fill in asking:
            sequence.ask = Ask(self._number, fill)

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

    # actors that come and go

    def _take_news(self) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, WorkerUp):
                self._links.append(news.link)
                self._poller.register(news.link.socket, zmq.POLLIN)
                self._placement.uneven |= any(link.retiring for link in self._links)
            elif isinstance(news, WorkerRetiring):
                self._placement.uneven = True
            else:
                self._end(news)

    def _end(self, news: WorkerDown) -> None:
        """An actor is gone: some of who was there are lost, the others are placed again (`Verdict`)."""
        link = news.link
        if link not in self._links:
            return
        self._receive(link)  # what it answered before its end still counts
        self._step.look()
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
        for index in self._step.undecided(link):
            self._step.decide(index, Row("failed", error=news.error))  # of a sequence that was freed
        link.sequences.clear()
        link.close()

    def _lose(self, sequence: Placed, error: GuidedError) -> None:
        sequence.displace()
        sequence.error = sequence.error or error
        self._lost[sequence.opening.sequence] = sequence.error


def _error(link: Link, result: RowResult) -> GuidedError:
    """A row's error, with a note of whose it is: for the log."""
    assert result.error is not None
    error = from_wire(result.error)
    error.add_note(f"on mask worker {link.index}, pid {link.place.pid}")
    return error
