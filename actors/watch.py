"""Watch: tells a mask actor that is frozen, stuck or too large from one that waits for
a CPU.

An actor has a heartbeat (`StepServer`): a counter in the slot table that one of its
threads increases, with the seconds for which its other threads have been busy. All
limits are on time in which a thread ran or was blocked: where other processes take the
CPUs, an actor is slow, and not at fault.
"""

from __future__ import annotations

import time

import psutil

from actors import processes
from actors.connection import Work, WorkerConnection
from actors.processes import TICK_SECONDS, thread_state, thread_times
from guided.pools.status import EndCause

LOAD_SECONDS = 10.0
"""Limit for loading a grammar."""
LOAD_WALL_SECONDS = 60.0
"""Limit for the same with the time in which it waited for a CPU, and for importing a
grammar library."""
SILENT_SECONDS = 5.0
REMOTE_SILENT_SECONDS = 15.0
"""An actor is ended after so long without a heartbeat, or without a beginning of what
it was asked for. On another node the network may be the reason."""
_LOCKED_SECONDS = 1.0
"""After so long without a heartbeat, a thread holds the interpreter lock."""
Verdict = tuple[EndCause, list[Work]]
"""Why an actor has to be ended, and what it was busy with if that is the reason: one
work, or none."""


class Watch:
    """Watches one incarnation of an actor.

    Args:
        process: None if the actor is on another node.
        mask_limit: limit for one mask in seconds.
        memory: limit of the resident memory in bytes.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        process: psutil.Process | None,
        mask_limit: float,
        memory: int,
    ) -> None:
        self.connection = connection
        self._process = process
        self._memory = memory
        self._limits = {
            "fill": mask_limit,
            "load": LOAD_SECONDS,
            "import": LOAD_WALL_SECONDS,
        }
        if process is None:
            self._most = REMOTE_SILENT_SECONDS
        else:
            self._most = SILENT_SECONDS
        self.silent = 0.0
        """Seconds without a heartbeat."""
        self._unread = 0.0
        """Seconds in which the actor was asked for masks and began with none."""
        self._looked_at = time.monotonic()
        self._beat = 0.0
        """The last heartbeat."""
        self._versions = 0
        """The sum of the versions of all masks, which changes with each."""
        self._state = ""
        """State of the heartbeat's thread: see `thread_state`."""
        self._waited = 0.0
        """Seconds that this thread has waited for a CPU."""

    def look(self) -> Verdict | None:
        """Look at the actor. Call it every `TICK_SECONDS`."""
        table = self.connection.table
        now = time.monotonic()
        mark = table.mark[0]
        passed = self._counted(int(mark["heart"]), now - self._looked_at)
        self._looked_at = now
        beat = float(mark["beat"])
        versions = int(table.ready.sum())
        works = self.connection.work()
        self.silent += passed
        if beat != self._beat:
            self.silent = 0.0
        self._unread += passed
        # While there are requests, the engine has not sent all.
        if (
            works
            or versions != self._versions
            or self.connection.requests
            or not table.has_work()
        ):
            self._unread = 0.0
        self._beat = beat
        self._versions = versions
        return self._verdict(works)

    def _counted(self, heart: int, passed: float) -> float:
        """Return how many of the seconds since the last look count: not those of
        waiting for a CPU."""
        # if it is more, this process was late itself
        passed = min(passed, 2 * TICK_SECONDS)
        if self._process is None:
            return passed
        before = self._waited
        _, self._waited = thread_times(heart, self._process.pid)
        self._state = thread_state(heart, self._process.pid)
        if self._state == "R":  # it waits now: that is in its times later
            return 0.0
        # Unreadable times are 0: then less seems to have been waited than before.
        return min(passed, max(0.0, passed - (self._waited - before)))

    def _verdict(self, works: list[Work]) -> Verdict | None:
        hidden = 0.0
        """Seconds that the heartbeat could not add, because another thread held the
        interpreter lock."""
        if (
            self.silent > _LOCKED_SECONDS
            and self._process is not None
            and self._state not in ("T", "t", "D", "")
        ):
            hidden = self.silent
            # the one that began last: while it held the lock, no other one began
            works = works[:1]
        for work in works:
            limit = self._limits[work.phase]
            if hidden:
                limit = min(limit, self._most)
            if max(0.0, work.seconds) + hidden > limit or (
                work.phase == "load" and work.wall > LOAD_WALL_SECONDS
            ):
                return work.phase, [work]
        if self.silent > self._most:
            return "frozen", []
        if self._unread > self._most and self.silent < _LOCKED_SECONDS:
            return "transfer", []
        if (
            self._process is not None
            and processes.resident_bytes(self._process) > self._memory
        ):
            return "memory", works[-1:]
        return None
