"""Who is compiled next: a constraint that is quick never waits for those that turned out to be slow.

Nobody can tell from a constraint what it will cost. So each first gets a slice of `SLICES[0]`, then one of `SLICES[1]`
(quick processes do that), and what is still not done goes to the slow processes, which take one after the other to its
end. In front of a quick one are then at the most that many short slices, never the whole of others' compilations. A
slice that is lost by a kill is small against what its constraint needs at the least.

With a slow process at hand, what has used its first slice goes on there without being killed. And a backend whose
latest constraints all used up their slices waits for the others: a flood that one of them is slow at costs those
who ask another one a few slices, however long it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from actors.compile_child import Child
from actors.compile_process import Outcome
from guided.constraint import Constraint
from guided.errors import GuidedError

__all__ = ["SLICES", "SLOW", "CompileQueue", "Job", "Task"]

SLICES = (0.03, 0.5)
"""Seconds of computing, by level."""
SLOW = len(SLICES)
"""The level of what is compiled to its end."""
_SLOW_AFTER = 2
"""Slices in a row that were not enough."""


@dataclass(frozen=True, slots=True)
class Job:
    """Compile `constraint` by the first of `backends` that can."""

    constraint: Constraint
    backends: list[str]


@dataclass(eq=False, slots=True)
class Task:
    """A job on its way."""

    job: Job
    future: Future[Outcome]
    since: float = field(default_factory=time.monotonic)
    level: int = 0
    spent: float = 0.0
    """Seconds that its attempts took so far."""
    child: Child | None = None
    """The process that is at it, where it is handed over running."""
    began: float = 0.0
    """`time.monotonic()` when that process got it."""
    failed: list[tuple[str, GuidedError]] = field(default_factory=list)
    """Backends that were tried, and what became of it."""
    crashed: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    lost: int = 0
    """Processes that were killed with it, by nobody knows whom."""

    @property
    def backend(self) -> str:
        """The one to try now."""
        return self.job.backends[len(self.failed)]

    def waited(self, begun: float) -> float:
        """Seconds in the queue, of those since `begun` (`time.monotonic()`)."""
        return time.monotonic() - max(self.since, begun) - self.spent


class CompileQueue:
    """Tasks by level, first come, first served within each. Thread-safe.

    Args:
        has_slow: there are processes for the last level alone; else whoever takes something takes anything.
    """

    def __init__(self, has_slow: bool) -> None:
        self._has_slow = has_slow
        self._levels: tuple[deque[Task], ...] = tuple(deque() for _ in range(SLOW + 1))
        self._changed = threading.Condition()
        self._idle = 0
        """Slow takers that wait."""
        self._closed = False
        self._overruns: Counter[tuple[int, str]] = Counter()
        """By level and backend: how many of its latest slices there, in a row, were not enough."""

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def put(self, task: Task) -> None:
        """Let it wait at its level."""
        with self._changed:
            self._levels[task.level].append(task)
            self._changed.notify_all()

    def hand_over(self, task: Task, child: Child) -> bool:
        """Give a running task to a slow taker, if one has nothing to do."""
        with self._changed:
            if self._idle <= len(self._levels[SLOW]):
                return False
            task.child, task.level = child, SLOW
            self._levels[SLOW].append(task)
            self._changed.notify_all()
            return True

    def take(self, *, slow: bool) -> Task | None:
        """The next task, as soon as there is one; None once it is closed."""
        every = range(len(self._levels))
        levels = every if not self._has_slow else every[SLOW:] if slow else every[:SLOW]
        with self._changed:
            self._idle += slow
            try:
                while not self._closed:
                    for level in levels:
                        if self._levels[level]:
                            return self._next(level)
                    self._changed.wait()
            finally:
                self._idle -= slow
        return None

    def note(self, task: Task, *, overrun: bool) -> None:
        """What became of a slice at the task's level."""
        with self._changed:
            key = task.level, task.backend
            self._overruns[key] = self._overruns[key] + 1 if overrun else 0

    def _next(self, number: int) -> Task:
        level = self._levels[number]
        for index, task in enumerate(level):
            if self._overruns[number, task.backend] < _SLOW_AFTER:
                del level[index]
                return task
        return level.popleft()

    def close(self) -> list[Task]:
        """Nothing is taken any more. Returns what was left."""
        with self._changed:
            self._closed = True
            left = [task for level in self._levels for task in level]
            for level in self._levels:
                level.clear()
            self._changed.notify_all()
        return left
