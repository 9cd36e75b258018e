"""Dispatcher: sends each step to the workers that are up, and collects the masks.

A sequence is opened on the worker with the fewest open sequences, and stays there until
it ends or the worker does.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from actors.connection import (
    SequenceState,
    StepPart,
    Work,
    WorkerConnection,
    last_tokens,
    send_all,
)
from actors.protocol import CHECKED, FAILED, STEERED
from actors.quarantine import Quarantine
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, PoolUnavailable, WorkerDied
from guided.pools.protocol import Grammar, ReadyMasks, StepMasks, forced_runs
from guided.pools.status import EndCause
from guided.sequence import GuidedSequence, VetoReport

_LOOK_SECONDS = 0.001
"""Poll interval while waiting for masks, workers and slots: a worker that finishes just
before `wake` is set sends no message."""
_SHORT_SECONDS = 0.0001
"""The same, in the last millisecond before a deadline."""


class _Step:
    """One step's rows."""

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch
        """The number of the batch."""
        self.parts: list[StepPart] = []
        self.waiting: dict[int, SequenceState] = {}
        """Rows of sequences that no worker can take now."""
        self.failed: dict[int, GuidedError] = {}
        self.all_ready = False
        """Set by `collect`."""

    def look(self) -> dict[int, SequenceState]:
        """Compare the versions; return the undecided rows."""
        undecided = dict(self.waiting)
        for part in self.parts:
            for row, state in part.look():
                if state.error is None:
                    undecided[row] = state
                else:
                    self.failed[row] = state.error
        return undecided


class Dispatcher:
    """Sequences on workers, and the steps between them. Implements the step methods of
    `MaskPool`. For one thread.

    Args:
        pool_wait: seconds that a sequence waits for a worker before it fails with
            `PoolUnavailable`.
        max_replays: how often a sequence is opened again after a worker died while it
            was busy with the sequence.
        forced_tokens: workers look ahead where a mask allows only one token.
    """

    def __init__(
        self, pool_wait: float, max_replays: int, forced_tokens: bool = False
    ) -> None:
        self._forced_tokens = forced_tokens
        self.pool_wait = pool_wait
        self._max_replays = max_replays
        self.workers: list[WorkerConnection] = []
        """Workers that are up."""
        self._sequences: dict[int, SequenceState] = {}
        self._step = _Step()
        self._is_changed = False
        """Whether a worker has ended since the last step."""
        self._holding: set[SequenceState] = set()
        """Sequences of a backend that holds the interpreter lock while it computes a
        mask."""
        self.quarantine = Quarantine()
        self.replays = 0
        """Sequences that outlived their worker and are opened on another one, since the
        start."""
        self._events: deque[Callable[[], None]] = deque()
        self.unavailable: PoolUnavailable | None = None
        """Why no worker will take a sequence, as far as is known."""
        self._poller = select.poll()

    def announce(self, event: Callable[[], None]) -> None:
        """Have the engine's thread call `event`: at its next call, or while it waits in
        `collect`. From any thread."""
        self._events.append(event)

    def _receive(self) -> None:
        """Read what the workers have answered, and handle the events."""
        for worker in self.workers:
            worker.receive()
        self._handle_events()

    def _handle_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def add(self, worker: WorkerConnection) -> None:
        """Take up a worker. Sequences may be opened on it."""
        self.workers.append(worker)
        self._poller.register(worker.channel.fd, select.POLLIN)

    def end(
        self,
        worker: WorkerConnection,
        error: GuidedError,
        cause: EndCause = "died",
        works: Collection[Work] = (),
    ) -> None:
        """Handle the end of a worker: its sequences fail, or are opened on another one
        when they are next wanted.

        The sequences that `works` concern fail. If the worker died and `max_replays` is
        0, each one with an open matcher fails too. Otherwise each one fails that n
        workers were busy with at their ends: loaded, opened or filled it. For a death n
        is `max_replays` + 1, for another end it is at least 2.

        Args:
            error: for the sequences that are lost.
            works: the reason why the supervisor ended the worker.
        """
        if worker not in self.workers:
            return
        worker.receive()  # what it answered before its end still counts
        self._poller.unregister(worker.channel.fd)
        self.workers.remove(worker)
        culprits = set(worker.concerned(works))
        busy = set(worker.concerned(worker.work()))
        self._suspect(cause, culprits, busy)
        if cause == "transfer" or (worker.is_remote and not busy):
            # Any of those that it should have begun with may be the reason.
            busy = {state for state in worker.sequences.values() if not state.is_ready}
        died = WorkerDied(f"{error.message} while it computed this request's mask")
        died.retryable = False  # the mask may have ended it
        if cause == "died":
            replays = self._max_replays
        else:
            replays = max(1, self._max_replays)
        for state in worker.sequences.values():
            state.replays += state in busy
            is_lost = state in culprits or state.replays > replays
            if cause == "died" and not replays:
                is_lost = is_lost or state.has_answered
            if is_lost:
                state.fail(
                    died if state in busy and isinstance(error, WorkerDied) else error
                )
        for part in self._step.parts:
            if part.worker is worker:
                self._step.waiting.update(part.look())
                part.select(part.ready)
        for state in worker.sequences.values():
            self.replays += state.error is None
            state.leave()
        self._is_changed = True
        worker.sequences.clear()
        worker.close()

    def _suspect(
        self,
        cause: EndCause,
        culprits: Collection[SequenceState],
        busy: Collection[SequenceState],
    ) -> None:
        """Note which constraint has ended a worker."""
        suspects = culprits
        if cause == "died":
            suspects = busy
        elif cause not in ("load", "fill"):
            return
        keys = {state.grammar.constraint.key for state in suspects}
        states = [
            state
            for state in self._sequences.values()
            if state.grammar.constraint.key in keys
        ]
        had_mask = any(
            state.has_answered or state.sequence.output_token_ids for state in states
        )
        # then it need not be the cause
        if cause == "died" and (had_mask or len(keys) > 1):
            return
        for key in keys:
            self.quarantine.note(key)

    def close(self) -> None:
        """Give up all connections and memory. Every open sequence is lost."""
        self.unavailable = error = PoolUnavailable("the pool is shut down")
        for state in self._sequences.values():
            state.fail(error)
        self._handle_events()
        for worker in list(self.workers):
            self.end(worker, error)

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        state = self._sequences[sequence.sequence_id] = SequenceState(sequence, grammar)
        adapter = BACKENDS.get(grammar.backend)
        if adapter is not None and adapter.holds_interpreter_lock:
            self._holding.add(state)

    def free(self, sequence_ids: Collection[int]) -> None:
        for sequence_id in sequence_ids:
            state = self._sequences.pop(sequence_id, None)
            if state is not None:
                self._holding.discard(state)
                if state.worker is not None:
                    state.worker.free(state)
                state.fail(
                    BackendError("the sequence was freed before its mask was collected")
                )
        if not self._sequences:  # there may be no next step to send the messages with
            send_all(self.workers)

    def rollback(self, sequence_id: int, length: int) -> None:
        state = self._sequences.get(sequence_id)
        if state is not None and state.worker is not None:
            state.worker.cut(state, length)

    def submit(
        self, sequences: Sequence[GuidedSequence], batch: int | None = None
    ) -> None:
        self._handle_events()
        is_same = batch is not None and batch == self._step.batch
        if self._is_changed or not (is_same and self._step.all_ready):
            self._assign(sequences, batch)
        self._step.all_ready = False
        outputs = last_tokens(sequences)
        for part in self._step.parts:
            part.send_outputs(*outputs)
        send_all(self.workers)

    def _assign(self, sequences: Sequence[GuidedSequence], batch: int | None) -> None:
        """Begin a step."""
        step = self._step = _Step(batch)
        self._is_changed = False
        for row, sequence in enumerate(sequences):
            state = self._sequences.get(sequence.sequence_id)
            if state is None:
                step.failed[row] = BackendError(
                    f"sequence {sequence.sequence_id} is not open"
                )
            else:
                step.waiting[row] = state
        self._place_all(step)

    def _place_all(self, step: _Step) -> None:
        """Open the waiting sequences that have no worker, if possible, and group the
        rows by worker."""
        parts: dict[WorkerConnection, dict[int, SequenceState]] = {}
        waiting = step.waiting
        step.waiting = {}
        for row, state in waiting.items():
            if state.worker is None and state.error is None:
                self._place(state)
            if state.error is not None:
                step.failed[row] = state.error
            elif state.worker is None:
                step.waiting[row] = state
            else:
                parts.setdefault(state.worker, {})[row] = state
        step.parts += [StepPart(worker, part) for worker, part in parts.items()]

    def refusal(self, constraint: Constraint) -> GuidedError | None:
        """Return why no sequence of a constraint is opened now, or None."""
        return self.unavailable or self.quarantine.error(constraint.key)

    def _place(self, state: SequenceState) -> None:
        """Open a sequence, if a worker can take it now. Fail it if it waited too long,
        or its grammar ends workers."""
        able = [worker for worker in self.workers if worker.free_slot() is not None]
        error = self.refusal(state.grammar.constraint)
        if not able and state.has_waited(self.pool_wait):
            error = PoolUnavailable(
                f"no mask worker could take the sequence for {self.pool_wait:g} s"
            )
        if error is not None:
            state.fail(error)
        elif able:
            # While a backend that holds the interpreter lock computes a mask, no other
            # thread of the worker runs. So its sequences share one worker, and others
            # avoid that worker as long as there are such sequences.
            apart = bool(self._holding)
            holder = next(
                (other.worker for other in self._holding if other.worker is not None),
                self.workers[-1],
            )
            holds = state in self._holding
            worker = min(
                able,
                key=lambda worker: (
                    apart and (worker is holder) != holds,
                    len(worker.sequences),
                ),
            )
            worker.open(state)

    def collect(self, deadline: float | None = None) -> StepMasks:
        step = self._step
        undecided = step.look()
        if undecided:
            undecided = self._wait_for_step(
                step, math.inf if deadline is None else time.monotonic() + deadline
            )
        result = StepMasks(failed=step.failed)
        for part in step.parts:
            table = part.table
            slots = part.slots[part.ready]
            rows = part.rows[part.ready]
            result.ready.append(ReadyMasks(table.mask, slots, rows, table.seconds))
            if self._forced_tokens:
                result.forced |= forced_runs(table.forced[slots], rows)
            result.seconds += float(table.seconds[slots].sum())
            status = table.status[slots]
            states = part.states[part.ready]
            for index in np.flatnonzero(status > FAILED).tolist():
                sequence = states[index].sequence
                sequence.steered |= bool(status[index] & STEERED)
                if status[index] & CHECKED:
                    length, final, keyword = table.veto[slots[index]].item()
                    result.note(
                        int(rows[index]),
                        sequence,
                        VetoReport(length, final, keyword.decode()),
                    )
        step.all_ready = not (undecided or step.failed)
        result.late = sorted(undecided)
        return result

    def _wait_for_step(self, step: _Step, deadline: float) -> dict[int, SequenceState]:
        """Wait until every row is decided, or until `deadline`, a `time.monotonic()`.
        Returns the undecided rows."""
        while True:
            for worker in self.workers:
                worker.request_wakeup()
            self._receive()
            self._place_all(step)
            send_all(self.workers)
            undecided = step.look()
            now = time.monotonic()
            if not undecided or now >= deadline:
                return undecided
            if deadline - now < _LOOK_SECONDS:  # `poll` waits for whole milliseconds
                time.sleep(min(_SHORT_SECONDS, deadline - now))
                timeout = 0.0
            else:
                timeout = 1000 * _LOOK_SECONDS
            polled = self._poller.poll(timeout)
            # a supervisor is about to announce its end
            if any(happened & select.POLLHUP for _, happened in polled):
                time.sleep(_LOOK_SECONDS)

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        if not sequence_ids:
            return []
        self._receive()
        can_open = any(worker.free_slot() is not None for worker in self.workers)
        return [
            sequence_id
            for sequence_id in sequence_ids
            if self._is_decided(sequence_id, can_open)
        ]

    def _is_decided(self, sequence_id: int, can_open: bool) -> bool:
        state = self._sequences.get(sequence_id)
        if state is None or state.error is not None:
            return True
        # its worker may have ended, or the pool does not start
        if state.worker is None:
            return (
                can_open
                or self.unavailable is not None
                or state.has_waited(self.pool_wait)
            )
        return state.is_ready
