"""Placement: which sequence is open on which worker, and what becomes of the sequences of a worker that ended.

A sequence stays on its worker, with four exceptions:

- A straggler is a sequence with masks that delay others. Its worker becomes a slow lane, and the other sequences leave.
- A suspect is a sequence with a mask that may have ended a worker. Its next mask is filled on a worker that the others
  leave.
- A worker that is to be replaced is emptied.
- Sequences are spread again when a worker is no longer a slow lane.

Used from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from actors.steps.connection import SequenceState, WorkerConnection
from guided.errors import GuidedError, WorkerDied
from guided.pools.protocol import EndCause

_WAIT_SECONDS = 10.0
"""Maximum time that a suspect waits for a worker that is empty or can be emptied without loss, and a straggler for a
slow lane: longer than a worker takes to start."""
_MAX_MOVES = 10
"""Maximum number of workers that may end while they hold a sequence, between two of its masks. The sequence need not be
the cause, but its wait must be bounded."""
_STRAGGLER_SECONDS, _STRAGGLER_FACTOR = 0.03, 5.0
"""A mask holds up others if it takes longer than this, and longer than this multiple of a typical mask."""
_STRAGGLER_MAX = 0.2
"""A mask that takes longer than this holds up others in any case: if slow masks grow gradually, they become typical."""
_LANE_SECONDS, _LANE_FACTOR = 0.01, 4.0
"""The same limits where there is a slow lane. They are lower because growing masks soon take seconds, and a request
with such masks is rarely alone."""
_RELAPSE_FACTOR = 4
"""Each time that a sequence straggles again, it needs so many times more quick masks to be an ordinary one: where each
item of an array has slow masks, the quick ones between them say nothing about the next."""
_TYPICAL_WEIGHT = 0.02
"""Weight of a step in the moving average of a typical mask's seconds."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """An incarnation has all grammars in use: sequences may be placed on it."""

    worker: WorkerConnection


@dataclass(frozen=True, slots=True)
class WorkerRetiring:
    """An incarnation is to be replaced: its sequences go elsewhere if they can."""

    worker: WorkerConnection


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """An incarnation is over."""

    worker: WorkerConnection
    error: GuidedError
    """For the sequences that are lost."""
    cause: EndCause = "died"
    loading: bool = False
    """It was also loading a grammar, which may have ended it."""


class Recovery:
    """Decides what becomes of the sequences of a worker that ended.

    With `max_replays=0` a death ends every sequence that had a mask from that worker, and the one that was being
    filled. A hang or an excess of memory ends the sequence that was being filled; the others are opened elsewhere,
    because their outputs are known. With replays a death is treated the same way, and the sequence that was being
    filled is tried again.

    Args:
        down: read before the worker's table is dropped.
        max_replays: how often a sequence is tried again after a worker ended while filling its row.
    """

    def __init__(self, down: WorkerDown, max_replays: int) -> None:
        self._down = down
        self._max_replays = max_replays
        # A retired worker was idle, whatever its mark says by now.
        self._suspects = set() if down.cause == "retired" else down.worker.suspects()
        self._certain = len(self._suspects) == 1 and not down.loading

    def is_lost(self, state: SequenceState) -> bool:
        """Return whether the sequence is over; if not, count the move. Call once, while it is still on the worker."""
        suspected = state in self._suspects
        if self._down.cause == "died" and not self._max_replays and (state.has_answered or suspected):
            return True
        if state.has_answered:
            state.moves = 0
        state.moves += 1
        if suspected:
            state.suspect = True
            state.deaths += self._certain
        return state.deaths > self._max_replays or state.moves > _MAX_MOVES

    def error(self, state: SequenceState) -> GuidedError:
        """Return the error of a sequence that is lost. It is not retryable if its own mask ended the worker."""
        error = self._down.error
        if isinstance(error, WorkerDied) and self._certain and state in self._suspects:
            error = WorkerDied(f"{error.message} while it computed this request's mask")
            error.retryable = False
        return error


class Placement:
    """The workers that are up, and the sequences on them."""

    def __init__(self) -> None:
        self.workers: list[WorkerConnection] = []
        self.suspects: set[SequenceState] = set()
        """Suspects, until they have received a mask from a worker without other sequences."""
        self.stragglers: set[SequenceState] = set()
        """Sequences with masks that hold up the others of a worker."""
        self.needs_rebalancing = False
        """A worker is no longer a slow lane and has few sequences, or a worker is to be emptied."""
        self.moved: set[SequenceState] = set()
        """Sequences that left their worker, or found none, since the dispatcher last emptied this set."""
        self._typical = 0.0
        """Seconds of a typical mask: a moving average."""

    @property
    def needs_attention(self) -> bool:
        """There are sequences or workers to be moved or watched."""
        return bool(self.needs_rebalancing or self.suspects or self.stragglers)

    # where a sequence can go

    def place(self, state: SequenceState, parent: SequenceState | None, now: float) -> bool:
        """Open the sequence on its parent's worker, or on the one with the fewest sequences. False: no worker can."""
        if state.suspect:
            return self.isolate(state, now)
        worker = parent.worker if parent is not None else None
        if worker is None or worker.reserved_for is not None or worker.retiring or not worker.has_slot():
            able = self._able(state)
            if not able:
                return False
            limit = self.straggler_seconds
            straggles = state in self.stragglers
            if straggles and not self._has_lane(able) and self._waits(state, now):
                return False  # a worker that can become the lane may be starting

            def cost(worker: WorkerConnection) -> tuple[bool, bool, bool, int]:
                # Stragglers go to slow lanes, and other sequences do not.
                wrong_lane = bool(worker.stragglers) != straggles
                return worker.retiring, wrong_lane, not worker.is_responsive(now, limit), worker.num_open

            worker = min(able, key=cost)
        if state in self.stragglers:
            worker.stragglers.add(state)
        self._open(state, worker, now, parent)
        return True

    def _has_lane(self, able: list[WorkerConnection]) -> bool:
        """Return whether one of these workers is a slow lane, or may become one, or has no sequences to hold up."""
        return any(worker.stragglers or not worker.num_open for worker in able) or self._may_have_lane()

    def _may_have_lane(self) -> bool:
        """Return whether another worker may become a slow lane: at most half of them are."""
        return sum(bool(worker.stragglers) for worker in self.workers) < len(self.workers) // 2

    def _waits(self, state: SequenceState, now: float) -> bool:
        """Return whether a sequence may still wait for a worker that suits it: for `_WAIT_SECONDS` at most."""
        return not state.waiting_since or now - state.waiting_since <= _WAIT_SECONDS

    def _able(self, state: SequenceState) -> list[WorkerConnection]:
        """Return the workers that have the sequence's grammar and a slot, and are not reserved."""
        return [
            worker
            for worker in self.workers
            if worker.reserved_for is None and state.grammar in worker.installed and worker.has_slot()
        ]

    def _open(
        self, state: SequenceState, worker: WorkerConnection, now: float, parent: SequenceState | None = None
    ) -> None:
        state.waiting_since = 0.0
        state.opened_at = now
        worker.open(state, parent)

    def withdraw(self, state: SequenceState) -> None:
        """Take a sequence off its worker, which is up, and close its matcher there."""
        worker = state.worker
        if worker is not None:
            straggles = state in worker.stragglers
            worker.free(state)
            self.needs_rebalancing |= straggles and not worker.stragglers
            self.moved.add(state)

    def add(self, worker: WorkerConnection) -> None:
        """A worker is up."""
        self.workers.append(worker)
        self.needs_rebalancing |= any(each.retiring for each in self.workers)

    def remove(self, worker: WorkerConnection) -> list[SequenceState]:
        """A worker is gone; return its sequences."""
        self.workers.remove(worker)
        self.moved.update(worker.sequences.values())
        return list(worker.sequences.values())

    # stragglers

    @property
    def straggler_seconds(self) -> float:
        """Seconds after which a mask holds up others."""
        return min(max(_STRAGGLER_SECONDS, _STRAGGLER_FACTOR * self._typical), _STRAGGLER_MAX)

    def note_typical(self, seconds: float) -> None:
        """Update the seconds of a typical mask from one step: its mean, or its median if masks are slow."""
        if seconds:
            self._typical += _TYPICAL_WEIGHT * (min(seconds, 4 * self._typical + 0.0001) - self._typical)

    @property
    def _lane_seconds(self) -> float:
        """Seconds after which a mask belongs on a slow lane, if there is one."""
        return max(_LANE_SECONDS, _LANE_FACTOR * self._typical)

    def note_slow(self, state: SequenceState, seconds: float) -> None:
        """While there are stragglers: make an ordinary sequence one too if its mask belongs on a slow lane."""
        if seconds > self._lane_seconds:
            state.quick_rows = 0
            self.stragglers.add(state)

    def note_straggler(self, state: SequenceState, seconds: float) -> None:
        """Count a straggler's quick masks. After enough of them in a row it is an ordinary sequence again."""
        state.quick_rows = state.quick_rows + 1 if seconds < self.straggler_seconds else 0
        if state.quick_rows >= state.quick_rows_needed:
            state.quick_rows_needed *= _RELAPSE_FACTOR
            self.stragglers.discard(state)
            if state.worker is not None:
                state.worker.stragglers.discard(state)
                self.needs_rebalancing |= not state.worker.stragglers

    def move_to_lane(self, state: SequenceState) -> None:
        """If another worker is a slow lane, take a straggler off its worker. It is then placed on the lane."""
        worker = state.worker
        if worker is not None and not worker.stragglers and any(each.stragglers for each in self.workers):
            self.withdraw(state)

    def clear_stuck_workers(self, now: float) -> list[SequenceState]:
        """If one mask holds up a worker, take the worker's other sequences off it.

        The worker becomes a slow lane, unless half of the workers are slow lanes already. The straggler then moves to
        one of those with its next mask. If the worker has ended, its sequences stay: `Recovery` decides on them after
        `WorkerDown`.

        Returns:
            The sequences that left a worker, to be placed again.
        """
        limit = self.straggler_seconds
        stuck = [worker for worker in self.workers if worker.is_stuck(now, limit)]
        moved: list[SequenceState] = []
        for worker in stuck:
            straggler = worker.busy_with()
            if straggler is not None:
                straggling = self._as_slow_as(straggler)
                self.stragglers |= straggling
                if worker.stragglers or self._may_have_lane():
                    worker.stragglers |= straggling.intersection(worker.sequences.values())
            others = [each for each in self.workers if each not in stuck and each.reserved_for is None]
            if any(not each.stragglers for each in others):
                # The sequence that holds the worker up may have been freed already.
                moved += self._clear(worker, worker.stragglers | ({straggler} if straggler is not None else set()))
        return moved

    def _as_slow_as(self, straggler: SequenceState) -> set[SequenceState]:
        """Return a straggler, the other sequences of its request, and those with a slow last mask."""
        request_id, limit = straggler.sequence.request_id, self._lane_seconds
        found = {straggler}
        for worker in self.workers:
            last = worker.table.seconds
            found.update(
                state
                for slot, state in worker.sequences.items()
                if state.sequence.request_id == request_id or last[slot] > limit
            )
        for state in found:
            state.quick_rows = 0
        return found

    def rebalance(self) -> None:
        """Empty workers that are to be replaced. Move sequences to a worker that is no longer a slow lane."""
        self.needs_rebalancing = False
        for worker in self.workers:
            if worker.retiring and any(not each.retiring and each.reserved_for is None for each in self.workers):
                self._clear(worker, {state for state in worker.sequences.values() if state.late_since})
                self.needs_rebalancing |= bool(worker.num_open)  # a late mask is being computed: at the next step
        ordinary = [
            each for each in self.workers if not each.stragglers and each.reserved_for is None and not each.retiring
        ]
        if ordinary:
            most = max(ordinary, key=lambda worker: worker.num_open)
            fewest = min(ordinary, key=lambda worker: worker.num_open)
            movable = [state for state in most.sequences.values() if not state.late_since]
            for state in movable[: (most.num_open - fewest.num_open) // 2]:
                self.withdraw(state)

    # suspects

    def isolate(self, state: SequenceState, now: float) -> bool:
        """Give a suspect a worker without other sequences; return False if there is none now."""
        if state.worker is not None and state.worker.reserved_for is state:
            return True
        worker = self._isolated(state, now)
        if worker is None:
            return False
        self._clear(worker, {state})
        if state.worker is not worker:
            self.withdraw(state)
            self._open(state, worker, now)
        worker.reserved_for = state
        return True

    def clear_suspects(self) -> None:
        """End the isolation of suspects that have received a mask or failed, and of the workers reserved for them."""
        for state in list(self.suspects):
            if state.error is not None or state.has_answered:
                self.suspects.discard(state)
                state.suspect = False
        for worker in self.workers:
            if worker.reserved_for not in self.suspects:
                worker.reserved_for = None

    def _isolated(self, state: SequenceState, now: float) -> WorkerConnection | None:
        """Return a worker for a suspect alone: an empty one, or one that can be emptied."""
        able = [worker for worker in self._able(state) if worker.is_idle]
        if not able:
            return None
        fewest = min(able, key=lambda worker: worker.num_open)
        alone = set(fewest.sequences.values()) <= {state}
        others_have_one = any(worker is not fewest and worker.reserved_for is None for worker in self.workers)
        return fewest if alone or others_have_one or not self._waits(state, now) else None

    def _clear(self, worker: WorkerConnection, staying: Collection[SequenceState]) -> list[SequenceState]:
        """Take all sequences but `staying` off a worker that is up. Returns them."""
        leaving = [state for state in worker.sequences.values() if state not in staying]
        for state in leaving:
            self.withdraw(state)
        return leaving
