"""Dispatcher: sends each step to the workers that are up, and collects the masks.

Used from the engine's thread, except `announce` and `interrupt`. Supervisors announce workers that come and go. This
takes effect at the next call, or at once if `collect` waits.
"""

from __future__ import annotations

import math
import operator
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from actors.steps.connection import SequenceState, StepOutputs, StepPart, WorkerConnection, send_all
from actors.steps.placement import Placement, Recovery, WorkerDown, WorkerRetiring, WorkerUp
from actors.steps.protocol import FREE, SLOW_SECONDS
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable
from guided.pools.protocol import Grammar, ReadyMasks, StepMasks, forced_runs
from guided.sequence import GuidedSequence

_LOOK_SECONDS = 0.001
"""Poll interval while waiting for masks: a worker that finishes just before `wake` is set sends no message."""
_PLACE_SECONDS = 0.02
"""Interval between attempts to place sequences that no worker can take, for example because none has the grammar."""
_GIVE_UP_FACTOR = 1.5
"""The supervisor ends a worker that exceeds the mask limit. If it does not, the sequence fails after this multiple of
the limit."""


class _Step:
    """One step's rows."""

    def __init__(self, sequences: Sequence[GuidedSequence]) -> None:
        self.sequences = sequences
        self.began = time.monotonic()
        self.states: list[SequenceState | None] = []
        """By row."""
        self.places: NDArray[np.intp] = np.empty((2, 0), np.intp)
        """`[2, rows]`: incarnation of the sequence's worker, and its slot there. `FREE` if it had none when the step
        began."""
        self.parts: list[StepPart] = []
        self.unplaced: dict[int, SequenceState] = {}
        """Rows of sequences that wait for a worker."""
        self.failed: dict[int, GuidedError] = {}
        self.all_ready = False
        """Set by `collect`."""

    def look(self) -> int:
        """Compare the versions; return how many rows are undecided."""
        return len(self.unplaced) + sum([part.look() for part in self.parts])

    def undecided(self) -> dict[int, SequenceState]:
        """Return the undecided rows, as of the last `look`."""
        rows = dict(self.unplaced)
        for part in self.parts:
            if part.missing:
                rows.update(part.states(~part.ready))
        return rows

    def take_out(self, states: Collection[SequenceState]) -> dict[int, SequenceState]:
        """Remove the undecided rows of `states` from their parts; return them."""
        taken: dict[int, SequenceState] = {}
        for part in self.parts:
            if part.look():
                found = {row: state for row, state in part.states(~part.ready).items() if state in states}
                if found:
                    part.remove(np.isin(part.rows, list(found)))
                    taken.update(found)
        return taken


class Dispatcher:
    """Sequences on workers, and the steps between them. Implements the step methods of `MaskPool`.

    Args:
        mask_limit: seconds that a mask may take before the supervisor ends the actor.
        pool_wait: seconds that a sequence waits for a worker before it fails with `PoolUnavailable`.
        max_replays: see `Recovery`.
        rejection_of: returns the error of a rejected grammar by its key; None if it is not rejected.
        forced_tokens: workers look ahead where a mask allows only one token.
    """

    def __init__(
        self,
        mask_limit: float,
        pool_wait: float,
        max_replays: int,
        rejection_of: Callable[[str], GuidedError | None] = lambda key: None,
        forced_tokens: bool = False,
    ) -> None:
        self._forced_tokens = forced_tokens
        self._give_up_seconds = _GIVE_UP_FACTOR * mask_limit
        self._pool_wait = pool_wait
        self._max_replays = max_replays
        self._rejection_of = rejection_of
        self._placement = Placement()
        self._workers = self._placement.workers
        self._sequences: dict[int, SequenceState] = {}
        self._step = _Step(())
        self._late: set[SequenceState] = set()
        """Sequences with a late mask, until a later step collects it or they are freed."""
        self._failed: set[SequenceState] = set()
        """Sequences with an `error`, until they are freed."""
        self._changed: set[SequenceState] = set()
        """Sequences with `changed_from`."""
        self._budgeted: set[SequenceState] = set()
        """Sequences with a budget."""
        self.replays = 0
        """Sequences that outlived their worker and are opened on another one, since the start."""
        self._lost: dict[int, GuidedError] = {}
        """Errors for `failures`, by sequence id."""
        self._tried_placing = 0.0
        """`time.monotonic()` of the last attempt to place waiting sequences."""
        self._events: deque[WorkerUp | WorkerRetiring | WorkerDown] = deque()
        self._interrupted = False
        self._closed = False
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # not before the last thread that writes to it is done
        self._poller.register(self._wake, zmq.POLLIN)

    def announce(self, event: WorkerUp | WorkerRetiring | WorkerDown) -> None:
        """Report that a worker came or went. From any thread."""
        self._events.append(event)
        os.eventfd_write(self._wake, 1)

    def interrupt(self) -> None:
        """End a `collect` that waits, for good. From any thread."""
        self._interrupted = True
        os.eventfd_write(self._wake, 1)

    # sequences

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        """See `MaskPool.open`."""
        state = SequenceState(sequence, grammar.key, sequence.parent_id, seconds=grammar.mask_seconds)
        self._sequences[sequence.sequence_id] = state
        if sequence.budget is not None:
            self._budgeted.add(state)

    def free(self, sequence_ids: Collection[int]) -> None:
        """See `MaskPool.free`."""
        for sequence_id in sequence_ids:
            self._lost.pop(sequence_id, None)
            state = self._sequences.pop(sequence_id, None)
            if state is not None:
                self._forget(state)
                self._placement.withdraw(state)
        if not self._sequences:  # there may be no next step to send the messages with
            send_all(self._workers)

    def _forget(self, state: SequenceState) -> None:
        late, placement = self._late, self._placement
        for states in (late, self._failed, self._changed, self._budgeted, placement.suspects, placement.stragglers):
            states.discard(state)

    def rollback(self, sequence_id: int, length: int) -> None:
        """See `MaskPool.rollback`."""
        state = self._sequences.get(sequence_id)
        if state is not None and state.worker is not None:
            state.changed_from = length if state.changed_from is None else min(state.changed_from, length)
            self._changed.add(state)

    def failures(self) -> dict[int, GuidedError]:
        """See `MaskPool.failures`."""
        self._handle_events()
        lost, self._lost = self._lost, {}
        return lost

    def placement(self) -> dict[int, set[int]]:
        """Return the ids of the open sequences of each worker that is up, by the worker's pid."""
        self._handle_events()
        return {
            worker.location.pid: {state.sequence_id for state in worker.sequences.values()} for worker in self._workers
        }

    # a step: out

    def submit(self, sequences: Sequence[GuidedSequence], new_tokens: NDArray[np.int32] | None = None) -> None:
        """See `MaskPool.submit`."""
        if self._events or self._placement.needs_attention:
            self._maintain()
        previous = self._step
        same = sequences is previous.sequences and type(sequences) is tuple
        if same and previous.all_ready and not self._changed and not self._placement.moved:
            step = self._step = _Step(sequences)
            step.states, step.places, step.parts = previous.states, previous.places, previous.parts
        else:
            step, new_tokens = self._assign(sequences), None
        if new_tokens is not None:
            for part in step.parts:
                part.send_tokens(new_tokens)
        elif step.parts:
            outputs = StepOutputs(sequences)
            for part in step.parts:
                part.send_outputs(outputs)
        send_all(self._workers)

    def _maintain(self) -> None:
        """Handle what happened since the last step, before sequences are placed."""
        self._handle_events()
        if self._placement.needs_rebalancing:
            self._placement.rebalance()
        for state in self._placement.stragglers:
            if state not in self._late:
                self._placement.move_to_lane(state)
        if self._placement.suspects:
            self._placement.clear_suspects()
            self._place_waiting(time.monotonic())  # now the workers are idle: one may be emptied for a suspect

    def _assign(self, sequences: Sequence[GuidedSequence]) -> _Step:
        """Begin a step: open the sequences that have no worker, and group the rows by worker."""
        previous, step = self._step, _Step(sequences)
        rows = self._take_over(previous, step)
        self._step = step
        for row in rows:
            state = step.states[row] = self._sequences.get(sequences[row].sequence_id)
            if state is not None:
                state.row = row
                if state.worker is None and state.error is None:
                    self._place(state, step.began)
        # A suspect that is isolated displaces other sequences.
        displaced = [state.row for state in self._placement.moved if state in step.states]
        for row in dict.fromkeys(rows + displaced):
            self._set_row(step, row)
        for state in self._changed:
            if state.worker is not None and state.changed_from is not None:
                state.worker.edit(state, state.changed_from)
            state.changed_from = None
        self._changed.clear()
        for worker in self._workers:
            of_worker = np.flatnonzero(step.places[0] == worker.incarnation)
            if len(of_worker):
                step.parts.append(StepPart(worker, of_worker, step.places[1, of_worker], step.states))
        return step

    def _take_over(self, previous: _Step, step: _Step) -> list[int]:
        """Copy the rows that hold the same sequence, in the same place, as in the previous step; return the others."""
        same = np.fromiter(map(operator.is_, step.sequences, previous.sequences), np.bool_)
        rows, more = len(same), len(step.sequences) - len(same)
        moved, self._placement.moved = self._placement.moved, set()
        for row in (*previous.failed, *[state.row for state in moved | self._failed]):
            if row < rows:
                same[row] = False
        step.states = previous.states[:rows] + [None] * more
        step.places = previous.places[:, :rows].copy()
        if more:
            step.places = np.concatenate((step.places, np.full((2, more), FREE)), axis=1)
        others: list[int] = np.flatnonzero(~same).tolist()
        return [*others, *range(rows, rows + more)]

    def _set_row(self, step: _Step, row: int) -> None:
        """Note where a row's sequence is open, or why it is not."""
        state = step.states[row]
        step.places[:, row] = FREE
        if state is None:
            step.failed[row] = BackendError(f"sequence {step.sequences[row].sequence_id} is not open")
        elif state.error is not None:
            step.failed[row], step.states[row] = state.error, None
        elif state.worker is None:
            step.unplaced[row] = state
            self._placement.moved.add(state)
        else:
            step.places[:, row] = state.worker.incarnation, state.slot

    def _fail_unplaced(self, step: _Step) -> None:
        """Fail the unplaced rows of sequences with an error."""
        for row, state in list(step.unplaced.items()):
            if state.error is not None:
                step.failed[row] = state.error
                del step.unplaced[row]

    def _place(self, state: SequenceState, now: float) -> WorkerConnection | None:
        """Open a sequence on a worker and return the worker. If none can take it, return None, and fail the sequence if
        its grammar is rejected or it has waited for `pool_wait` seconds."""
        if self._closed:
            self._lose(state, PoolUnavailable("the pool is shut down"))
            return None
        parent = self._sequences.get(state.parent_id) if state.parent_id is not None else None
        if self._placement.place(state, parent, now):
            return state.worker
        state.waiting_since = state.waiting_since or now
        error = self._rejection_of(state.grammar)
        if error is None and now - state.waiting_since >= self._pool_wait:
            error = PoolUnavailable(f"no mask worker could take the sequence for {self._pool_wait:g} s")
        if error is not None:
            self._lose(state, error)
        return None

    # a step: back

    def collect(self, timeout: float | None = None, patience: float | None = None) -> StepMasks:
        """See `MaskPool.collect`."""
        step = self._step
        for worker in self._workers:
            if not worker.shared:
                self._receive(worker)
        if step.look():
            started = time.monotonic()
            limit = self._give_up_seconds if timeout is None else timeout
            self._wait_for_step(step, (step.began if timeout is None else started) + limit, patience)
            self._sort_undecided(step, waited_for_all=timeout is None)
        return self._masks(step)

    def _wait_for_step(self, step: _Step, deadline: float, patience: float | None) -> None:
        """Wait until every row is decided or `deadline` is over. After `patience` seconds one decided row suffices."""
        began = time.monotonic()
        enough = deadline if patience is None else began + patience
        half = math.inf if patience is None else began + patience / 2
        for worker in list(self._workers):
            self._receive(worker)
        while True:
            for worker in self._workers:
                worker.request_wakeup()
            undecided = step.look()
            now = time.monotonic()
            left = (enough if undecided < len(step.sequences) else deadline) - now
            if not undecided or self._interrupted or left <= 0 or (patience is not None and self._is_futile(step)):
                break
            if now >= half:  # early enough to fill rows that wait behind a slow one elsewhere, in time
                half = math.inf
                self._clear_stuck_workers()
            self._wait(min(left, _LOOK_SECONDS))
        if undecided and patience is not None:
            self._clear_stuck_workers()

    def _is_futile(self, step: _Step) -> bool:
        """Return whether only stragglers are missing: they would miss the deadline anyway."""
        if not self._placement.stragglers:
            return False
        undecided = step.undecided()
        return len(undecided) < len(step.sequences) and self._placement.stragglers.issuperset(undecided.values())

    def _sort_undecided(self, step: _Step, waited_for_all: bool) -> None:
        """Note the undecided rows as late; fail those that have exceeded the time limit."""
        step.look()
        for row, state in step.undecided().items():
            if self._sequences.get(state.sequence_id) is not state:
                step.failed[row] = BackendError("the sequence was freed before its mask was collected")
            elif waited_for_all and self._is_overdue(state, step.began):
                step.failed[row] = self._give_up(state)
            else:
                state.late_since = state.late_since or step.began
                self._late.add(state)

    def _masks(self, step: _Step) -> StepMasks:
        """Return the step's result, and update the counters and the typical mask time."""
        found = StepMasks(failed=step.failed, seconds=sum([worker.take_seconds() for worker in self._workers]))
        ready_rows = 0
        for part in step.parts:
            slots, rows = part.slots, part.rows
            if part.missing:
                slots, rows = slots[part.ready], rows[part.ready]
            found.ready.append(ReadyMasks(part.table.mask, slots, rows, part.table.seconds))
            if self._forced_tokens:
                found.forced |= forced_runs(part.table.forced[slots], rows)
            ready_rows += len(rows)
        if self._late or self._placement.stragglers:
            self._note_ready(step)
        for state in self._budgeted:
            state.note_steered()
        if ready_rows:
            typical = found.seconds / ready_rows
            if typical > SLOW_SECONDS:  # slow masks dominate the mean
                typical = float(np.median(np.concatenate([part.seconds[part.slots] for part in found.ready])))
            self._placement.note_typical(typical)
        step.all_ready = ready_rows == len(step.sequences)
        if not step.all_ready:
            found.late = sorted(row for row in step.undecided() if row not in step.failed)
        return found

    def _note_ready(self, step: _Step) -> None:
        """Note the ready rows of sequences that were late, and of stragglers."""
        for part in step.parts:
            ready = part.states(part.ready)
            seconds = dict(zip(part.rows.tolist(), part.table.seconds[part.slots].tolist(), strict=True))
            for row, state in ready.items():
                if state in self._late:
                    self._settle(state)
                if state in self._placement.stragglers:
                    self._placement.note_straggler(state, seconds[row])
                elif self._placement.stragglers:
                    self._placement.note_slow(state, seconds[row])

    def settled(self, timeout: float = 0.0) -> list[int]:
        """See `MaskPool.settled`."""
        if not self._late:
            return []
        last = time.monotonic() + timeout
        self._handle_events()
        for worker in list(self._workers):
            self._receive(worker)
        self._clear_stuck_workers()
        while True:
            for worker in self._workers:
                worker.request_wakeup()
            now = time.monotonic()
            self._place_waiting(now)
            found = [state for state in self._late if self._is_settled(state)]
            if found or self._interrupted or now >= last:
                return sorted(state.sequence_id for state in found)
            self._wait(min(last - now, _PLACE_SECONDS))

    def _is_overdue(self, state: SequenceState, since: float) -> bool:
        """Return whether a worker has exceeded the time limit for a mask that was requested at `since`.

        The time that the sequence waited for a worker does not count.
        """
        seconds = time.monotonic() - max(since, state.opened_at)
        return state.worker is not None and seconds >= self._give_up_seconds

    def _give_up(self, state: SequenceState) -> GuidedError:
        """Fail a sequence that has waited too long. The error is retryable unless the worker is busy with its mask."""
        error = MaskTimeout(f"no mask within {self._give_up_seconds:g} s")
        error.retryable = state.worker is None or state.worker.busy_with() is not state
        self._lose(state, error)
        return error

    def _is_settled(self, state: SequenceState) -> bool:
        if state.error is None and self._is_overdue(state, state.late_since):
            self._give_up(state)
        return state.error is not None or state.is_ready

    def _settle(self, state: SequenceState) -> None:
        state.late_since = 0.0
        self._late.discard(state)

    # while waiting

    def _wait(self, seconds: float) -> None:
        """Wait for answers or events, and handle them."""
        sockets = {socket for socket, _ in self._poller.poll(math.ceil(seconds * 1000))}
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.socket in sockets or not worker.shared:  # `receive` also measures its silence
                self._receive(worker)
        if self._wake in sockets:
            os.eventfd_read(self._wake)
            self._handle_events()
        if now - self._tried_placing > _PLACE_SECONDS:
            self._place_waiting(now)

    def _receive(self, worker: WorkerConnection) -> None:
        for state, error in worker.receive():
            self._fail(state, error)
            for row in self._step.take_out({state}):
                self._step.failed[row] = error

    def _place_waiting(self, now: float) -> None:
        """Open the sequences that wait for a worker, as far as workers can take them."""
        self._tried_placing = now
        step = self._step
        late = [state for state in self._late if state.worker is None and state.error is None]
        if not step.unplaced and not late:
            return
        if self._placement.suspects:
            self._placement.clear_suspects()
        for row, state in list(step.unplaced.items()):
            worker = None if state.error is not None else state.worker or self._place(state, now)
            if worker is not None:
                step.parts.append(StepPart(worker, np.array([row]), np.array([state.slot]), step.states))
                del step.unplaced[row]
        self._fail_unplaced(step)
        for state in late:
            if state.error is None and state.worker is None:
                self._place(state, now)
        send_all(self._workers)

    def _clear_stuck_workers(self) -> None:
        """Move rows that wait behind a slow one. Called if rows are late, or half of the deadline is over."""
        moved = self._placement.clear_stuck_workers(time.monotonic())
        if moved:
            self._displace(moved)
            self._step.look()

    def _displace(self, states: Iterable[SequenceState]) -> None:
        """Place sequences that have left their worker again, if their mask is being waited for."""
        now = time.monotonic()
        self._step.unplaced.update(self._step.take_out(set(states)))
        wanted = self._late.union(self._step.unplaced.values())
        for state in states:
            if state in wanted:
                state.waiting_since = now
        self._place_waiting(now)

    # workers that come and go

    def _handle_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, WorkerUp):
                event.worker.look_ahead = self._forced_tokens
                self._placement.add(event.worker)
                self._poller.register(event.worker.socket, zmq.POLLIN)
            elif isinstance(event, WorkerRetiring):
                self._placement.needs_rebalancing = True
            elif event.worker in self._workers:
                self._end(event)

    def _end(self, down: WorkerDown) -> None:
        """Handle the end of a worker: its sequences fail, or are placed again (`Recovery`)."""
        worker, step = down.worker, self._step
        self._receive(worker)  # what it answered before its end still counts
        self._poller.unregister(worker.socket)
        recovery = Recovery(down, self._max_replays)
        states = self._placement.remove(worker)
        taken = step.take_out(states)
        kept: list[SequenceState] = []
        for state in states:
            if self._closed or recovery.is_lost(state):
                self._lose(state, recovery.error(state))
            else:
                kept.append(state)
                if state.suspect:
                    self._placement.suspects.add(state)
            state.leave()
        for row, state in taken.items():
            if state.error is not None:
                step.failed[row] = state.error
            else:
                step.unplaced[row] = state
        for part in step.parts:  # rows of sequences that were freed since they were submitted
            if part.worker is worker and part.look():
                step.failed.update(dict.fromkeys(part.rows[~part.ready].tolist(), down.error))
                part.remove(~part.ready)
        self.replays += len(kept)
        worker.sequences.clear()
        worker.close()
        self._displace(kept)

    def _lose(self, state: SequenceState, error: GuidedError) -> None:
        """Fail a sequence for another reason than a worker's answer. `failures` reports it."""
        self._fail(state, error)
        self._lost[state.sequence_id] = state.error or error

    def _fail(self, state: SequenceState, error: GuidedError) -> None:
        state.error = state.error or error
        self._failed.add(state)

    def close(self) -> None:
        """Give up all connections and memory. Every open sequence is lost."""
        self._handle_events()
        self._closed = True
        error = PoolUnavailable("the pool is shut down")
        for worker in list(self._workers):
            self._end(WorkerDown(worker, error))
        for state in self._sequences.values():
            self._fail(state, error)
