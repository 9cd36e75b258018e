"""CompileQueue: constraints that wait for a compile process, each client's in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from guided.constraint import Constraint
from guided.pools.protocol import Grammar


class Task(NamedTuple):
    """A constraint that waits for a process."""

    constraint: Constraint
    backends: Sequence[str]
    key: str
    future: Future[Grammar]
    client: str
    submitted: float
    """`time.monotonic()`."""


class CompileQueue:
    """While several clients wait, none has more than half of the queue, or gets more
    than half of the processes.

    Not thread-safe.

    Args:
        length: maximum number of tasks that wait.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._last = ""
        """The client of the task that was taken last."""
        self.waiting: list[Task] = []
        self.running: list[Task] = []

    def put(self, task: Task) -> Task | None:
        """Add a task. Returns the one that there is no room for: this one, or the
        newest of the client with most."""
        self.waiting.append(task)
        if len(self.waiting) <= self._length:
            return None
        ((client, number),) = Counter(task.client for task in self.waiting).most_common(
            1
        )
        if number <= self._length // 2:
            client = task.client
        refused = next(task for task in reversed(self.waiting) if task.client == client)
        self.waiting.remove(refused)
        return refused

    def expired(self, before: float) -> list[Task]:
        """Take out all tasks that were submitted before a time."""
        old = [task for task in self.waiting if task.submitted < before]
        self.waiting = [task for task in self.waiting if task.submitted >= before]
        return old

    def take(self) -> Task | None:
        """Move the oldest task of the client with the fewest running ones to `running`,
        and return it."""
        running = Counter(task.client for task in self.running)
        task = min(
            self.waiting,
            key=lambda task: (running[task.client], task.client == self._last),
            default=None,
        )
        if task is not None:
            self._last = task.client
            self.waiting.remove(task)
            self.running.append(task)
        return task

    def put_back(self, task: Task) -> None:
        """Have the task that was taken last wait again."""
        self.running.remove(task)
        self.waiting.insert(0, task)
