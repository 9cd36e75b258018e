"""CompileActor: owns the processes that compile, and kills those that take too long or too much.

One actor for the pool, with children, rather than a child a mask actor: a mask actor's death then ends no compilation,
a compilation can't starve a mask actor of memory, and whoever has to kill a child runs beside it and never native code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from actors.compile.child import CompileProcess, ForkServer, ProcessLimits, ProcessLost, TimeSliceExceeded
from actors.compile.loading import from_chunks
from actors.compile.process import CompileRequest, CompileResult
from actors.supervision.process import Owner, exit_with_owner
from guided.compilation import conclusion, is_about_backend
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileQueueFull,
    CompileTimeout,
    ConstraintTooLarge,
    GuidedError,
    PoolUnavailable,
    bounded,
    from_wire,
    to_wire,
)
from guided.limits import CompileLimits
from guided.vocabulary import Vocabulary

__all__ = ["CompileActor", "CompileJob", "Compiler"]

SLICES = (0.03, 0.5)
"""Seconds of computing, by level."""
SLOW = len(SLICES)
"""The level of what is compiled to its end."""
_SLOW_AFTER = 2
"""Slices in a row that were not enough."""

_RESERVE = 0.1
"""Share of the budget that is kept for each backend that may still be tried: most refuse or compile in far less."""
_KEPT_BYTES = 256 << 20
"""A process that has grown by more than this does no further constraint."""
_MOST_LOST = 4
"""Processes that may be killed with a constraint, by nobody knows whom: the system kills so what takes its memory."""
_RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class CompileActor:
    """The compiler, as Ray sees it. Async, so that waiting compilations cost no thread.

    Args:
        owner: the engine's process; this one ends with it.
    """

    def __init__(self, owner: Owner, limits: CompileLimits) -> None:
        exit_with_owner(owner)
        self._compiler = Compiler(owner.fetch(), limits)

    async def compile(self, backends: Sequence[str], *pieces: bytes) -> tuple[CompileResult, bytes]:
        """The outcome, and beside it (an object of its own, so that it needn't visit the engine) the dumped grammar."""
        outcome = await asyncio.wrap_future(self._compiler.submit(CompileJob(from_chunks(pieces), list(backends))))
        dumped, outcome.dumped = outcome.dumped, b""
        return outcome, dumped

    async def pids(self) -> list[int]:
        """The compile processes; also the sign that this actor is alive."""
        return self._compiler.pids

    async def pid(self) -> int:
        """This process."""
        return os.getpid()


class Compiler:
    """`limits.processes` warm children, each with a thread that feeds it, watches it and replaces it."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._limits = limits
        slow = limits.processes // 2
        self._has_slow = slow > 0
        self._queue = CompileQueue(self._has_slow)
        self._template = ForkServer(vocabulary.to_bytes())
        self._children: dict[int, CompileProcess] = {}
        # The template dies with the thread that started it, whichever of these that was: none ends before all do.
        self._end = threading.Barrier(limits.processes)
        self._threads = [
            threading.Thread(target=self._work, args=(index, index >= limits.processes - slow), daemon=True)
            for index in range(limits.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CompileJob) -> Future[CompileResult]:
        """Compile when a child is free. The future never raises: an `CompileResult` holds the error."""
        future: Future[CompileResult] = Future()
        future.set_running_or_notify_cancel()  # a thread is to answer it: nobody may cancel it
        self._queue.put(CompileTask(job, future))
        return future

    @property
    def pids(self) -> list[int]:
        """The children that are there."""
        return [child.pid for child in list(self._children.values())]

    def close(self) -> None:
        """End: what waits is failed, what is being compiled is compiled first."""
        for task in self._queue.close():
            self._finish(task, PoolUnavailable("the compiler was shut down"))
        for thread in self._threads:
            thread.join()
        self._template.close()

    def _work(self, index: int, slow: bool) -> None:
        """What one thread does: tasks, one after the other, in a child of its own."""
        child = None if slow else self._fork(index)
        while (task := self._queue.take(slow=slow)) is not None:
            waited = task.waited(self._template.started)
            if task.child is None and waited > self._limits.wait_seconds:
                text = f"this constraint waited {waited:.0f} s for others that are compiled; try again later"
                self._finish(task, CompileQueueFull(text))
                continue
            if task.child is not None:
                self._drop(index, child)
                child = self._children[index] = task.child
            elif child is None or not child.alive:
                self._drop(index, child)
                child = self._fork(index)
            if not self._serve_safely(task, child):
                del self._children[index]
                child = None if slow else self._fork(index)
        self._drop(index, child)
        self._end.wait()

    def _fork(self, index: int) -> CompileProcess:
        while True:
            try:
                child = self._children[index] = self._template.fork()
            except OSError as error:
                _log.error("there is no compile process, which is tried again: %s", error)
                time.sleep(_RETRY_SECONDS)
            else:
                return child

    def _drop(self, index: int, child: CompileProcess | None) -> None:
        self._children.pop(index, None)
        if child is not None:
            child.kill()

    def _serve_safely(self, task: CompileTask, child: CompileProcess) -> bool:
        try:
            return self._serve(task, child)
        except Exception as error:  # a mistake of ours costs one constraint, not a thread
            _log.exception("a constraint was not compiled")
            child.kill()
            self._finish(task, BackendError(bounded(f"compiling failed: {error!r}")))
            return False

    def _serve(self, task: CompileTask, child: CompileProcess) -> bool:
        """One attempt at `task`, or the rest of one. False where `child` is gone: killed, or handed over."""
        try:
            if task.child is None:
                task.began = time.monotonic()
                child.start(CompileRequest(task.job.constraint, task.backend, self._limits.grammar_bytes))
            task.child = None
            outcome = child.wait(self._allowance(task))
        except TimeSliceExceeded:
            self._queue.note(task, overrun=True)
            if not self._queue.hand_over(task, child):
                child.kill()
                task.spent += time.monotonic() - task.began
                task.level += 1
                self._queue.put(task)
            return False
        except ProcessLost as lost:
            self._lost(task, child, lost)
            return False
        except GuidedError as error:
            self._killed(task, child, error)
            return False
        task.spent += time.monotonic() - task.began
        if task.level < SLOW:
            self._queue.note(task, overrun=False)
        if outcome.error is None:
            outcome.seconds, outcome.crashed, outcome.timed_out = task.spent, task.crashed, task.timed_out
            task.future.set_result(outcome)
        else:
            self._failed(task, from_wire(outcome.error))
        if child.growth > _KEPT_BYTES:
            child.kill()
            return False
        return True

    def _seconds(self, task: CompileTask) -> float:
        """What this attempt may take: all that is left, but for what is kept for the backends after this one."""
        left_over = len(task.job.backends) - len(task.failed) - 1
        return self._limits.seconds * (1 - _RESERVE * left_over) - task.spent

    def _allowance(self, task: CompileTask) -> ProcessLimits:
        sliced = SLICES[task.level] if self._has_slow and task.level < SLOW else None
        return ProcessLimits(task.began + self._seconds(task), self._limits.memory_bytes, sliced)

    def _lost(self, task: CompileTask, child: CompileProcess, lost: ProcessLost) -> None:
        """Once more, unless that has happened too often."""
        task.lost += 1
        if task.lost == _MOST_LOST:
            ended = f"compiling this constraint ended its process ({lost}), {_MOST_LOST} times"
            self._killed(task, child, BackendError(ended))
            return
        child.kill()
        task.spent += time.monotonic() - task.began
        task.level = 0
        self._queue.put(task)

    def _killed(self, task: CompileTask, child: CompileProcess, error: GuidedError) -> None:
        """An attempt that ended with its process, or is to."""
        seconds = self._seconds(task)
        task.spent += time.monotonic() - task.began
        child.kill()
        name = task.backend
        if isinstance(error, CompileTimeout):
            task.timed_out.append(name)
            error = CompileTimeout(
                f"compiling this constraint took more than {seconds:.3g} s with {name}; "
                "a simpler one, or another backend, may do"
            )
        elif isinstance(error, BackendError):
            task.crashed.append(name)
            _log.warning("%s, compiling with %s: %s", error, name, task.job.constraint.key)
        elif isinstance(error, ConstraintTooLarge):
            error = ConstraintTooLarge(f"with {name}, {error.message}")
        self._failed(task, error)

    def _failed(self, task: CompileTask, error: GuidedError) -> None:
        """Try the next backend, or say what became of them all."""
        if not is_about_backend(error):
            self._finish(task, error)
            return
        task.failed.append((task.backend, error))
        if len(task.failed) == len(task.job.backends):
            self._finish(task, conclusion(task.failed))
            return
        # Behind those that were not tried at all, and before those that are known to be slow.
        task.level = 1
        self._queue.put(task)

    def _finish(self, task: CompileTask, error: GuidedError) -> None:
        task.future.set_result(
            CompileResult(to_wire(error), seconds=task.spent, crashed=task.crashed, timed_out=task.timed_out)
        )


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Compile `constraint` by the first of `backends` that can."""

    constraint: Constraint
    backends: list[str]


@dataclass(eq=False, slots=True)
class CompileTask:
    """A job on its way."""

    job: CompileJob
    future: Future[CompileResult]
    since: float = field(default_factory=time.monotonic)
    level: int = 0
    spent: float = 0.0
    """Seconds that its attempts took so far."""
    child: CompileProcess | None = None
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
        self._levels: tuple[deque[CompileTask], ...] = tuple(deque() for _ in range(SLOW + 1))
        self._changed = threading.Condition()
        self._idle = 0
        """Slow takers that wait."""
        self._closed = False
        self._overruns: Counter[tuple[int, str]] = Counter()
        """By level and backend: how many of its latest slices there, in a row, were not enough."""

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def put(self, task: CompileTask) -> None:
        """Let it wait at its level."""
        with self._changed:
            self._levels[task.level].append(task)
            self._changed.notify_all()

    def hand_over(self, task: CompileTask, child: CompileProcess) -> bool:
        """Give a running task to a slow taker, if one has nothing to do."""
        with self._changed:
            if self._idle <= len(self._levels[SLOW]):
                return False
            task.child, task.level = child, SLOW
            self._levels[SLOW].append(task)
            self._changed.notify_all()
            return True

    def take(self, *, slow: bool) -> CompileTask | None:
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

    def note(self, task: CompileTask, *, overrun: bool) -> None:
        """What became of a slice at the task's level."""
        with self._changed:
            key = task.level, task.backend
            self._overruns[key] = self._overruns[key] + 1 if overrun else 0

    def _next(self, number: int) -> CompileTask:
        level = self._levels[number]
        for index, task in enumerate(level):
            if self._overruns[number, task.backend] < _SLOW_AFTER:
                del level[index]
                return task
        return level.popleft()

    def close(self) -> list[CompileTask]:
        """Nothing is taken any more. Returns what was left."""
        with self._changed:
            self._closed = True
            left = [task for level in self._levels for task in level]
            for level in self._levels:
                level.clear()
            self._changed.notify_all()
        return left
