"""CompileActor: owns the compile processes, distributes constraints to them and kills those that exceed a limit.

The pool has one such actor. It never runs native code itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec.msgpack import Decoder

from actors.compile.child import CompileProcess, ForkServer, ProcessLost, TimeSliceExceeded
from actors.compile.process import CompileRequest, CompileResult
from actors.processes import ProcessLocation, exit_with_owner
from guided.compilation import conclusion, is_about_backend
from guided.constraint import Constraint
from guided.cpus import available_cpus
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

_SLICES = (0.03, 0.5)
"""Time slice of each level, in CPU seconds."""
_FINAL_LEVEL = len(_SLICES)
"""The level without a time slice: a constraint here is compiled to its end."""
_SLOW_AFTER = 2
"""A backend counts as slow at a level after this number of consecutive exceeded time slices there."""
_RESERVE = 0.1
"""Share of the time limit kept for each backend that may still be tried: most reject, or finish, in far less."""
_MAX_GROWTH_BYTES = 64 << 20
"""A process that has grown by more than this is replaced after its constraint."""
_MAX_LOST = 4
"""Maximum number of processes that may be killed externally (for example by the OOM killer) with one constraint."""
_RETRY_SECONDS = 1.0
"""Pause before another attempt to start a compile process."""
_decode = Decoder(Constraint).decode
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _CompileTask:
    """State of a compilation that is not finished."""

    constraint: Constraint
    backends: Sequence[str]
    future: Future[CompileResult]
    submitted: float = field(default_factory=time.monotonic)
    level: int = 0
    spent: float = 0.0
    """Seconds of the attempts that are over."""
    process: CompileProcess | None = None
    """Set while the task is handed over to another thread together with its running process."""
    began: float = 0.0
    """`time.monotonic()` when the current process got it."""
    failed: list[tuple[str, GuidedError]] = field(default_factory=list)
    """Backends that were tried, and their errors."""
    crashed: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    lost: int = 0
    """Processes that were killed externally with this task."""

    @property
    def backend(self) -> str:
        """The backend to try now."""
        return self.backends[len(self.failed)]

    def waited(self, since: float) -> float:
        """Return the seconds in the queue after `since` (`time.monotonic()`)."""
        return time.monotonic() - max(self.submitted, since) - self.spent

    def end_attempt(self) -> None:
        """Count the time of the current process."""
        self.spent += time.monotonic() - self.began


class CompileActor:
    """The compiler as a Ray actor. Its methods are async, so that a waiting compilation occupies no thread.

    Args:
        owner: the engine's process; this process ends with it.
    """

    RAY_OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, owner: ProcessLocation, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        exit_with_owner(owner)
        self._compiler = Compiler(vocabulary, limits)

    async def compile(self, constraint: bytes, backends: Sequence[str]) -> tuple[CompileResult, bytes]:
        """Compile a constraint. The serialized grammar is a second object, which does not pass through the engine."""
        result = await asyncio.wrap_future(self._compiler.submit(_decode(constraint), backends))
        dumped, result.dumped = result.dumped, b""
        return result, dumped

    async def pids(self) -> list[int]:
        """Return the pids of the compile processes."""
        return self._compiler.pids

    async def location(self) -> ProcessLocation:
        """Return where this actor runs; also shows that it is alive."""
        return ProcessLocation.of_this_actor()


class Compiler:
    """Warm compile processes, each with a thread that feeds, watches and replaces it."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._limits = limits
        count = limits.processes or max(2, min(8, available_cpus() // 2))
        slow = count // 2
        self._has_slow = slow > 0
        self._queue = _CompileQueue(self._has_slow)
        self._fork_server = ForkServer(vocabulary.to_bytes())
        self._processes: dict[int, CompileProcess] = {}
        # The fork server dies with the thread that started it, which may be any of these: they all end together.
        self._end = threading.Barrier(count)
        self._threads = [
            threading.Thread(target=self._work, args=(index, index >= count - slow), daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, constraint: Constraint, backends: Sequence[str]) -> Future[CompileResult]:
        """Compile `constraint` with the first of `backends` that can enforce all of it, once a process is free.

        The future never raises: the `CompileResult` holds the error.
        """
        future: Future[CompileResult] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: a thread will set its result
        self._queue.put(_CompileTask(constraint, backends, future))
        return future

    @property
    def pids(self) -> list[int]:
        """Pids of the compile processes."""
        return [process.pid for process in list(self._processes.values())]

    def close(self) -> None:
        """Fail the tasks that wait, finish those that are being compiled, end the processes."""
        for task in self._queue.close():
            self._finish(task, PoolUnavailable("the compiler was shut down"))
        for thread in self._threads:
            thread.join()
        self._fork_server.close()

    def _work(self, index: int, slow: bool) -> None:
        """Body of a thread: handle one task after the other in the thread's own process."""
        if not slow:
            self._fork(index)
        while (task := self._queue.take(slow=slow)) is not None:
            waited = task.waited(self._fork_server.started)
            if task.process is None and waited > self._limits.wait_seconds:
                text = f"this constraint waited {waited:.0f} s for others that are compiled; try again later"
                self._finish(task, CompileQueueFull(text))
                continue
            if task.process is not None:
                self._kill(index)
                self._processes[index] = task.process
            elif index not in self._processes or not self._processes[index].alive:
                self._kill(index)
                self._fork(index)
            if not self._attempt_safely(task, self._processes[index]):
                del self._processes[index]
                if not slow:
                    self._fork(index)
        self._kill(index)
        self._end.wait()

    def _fork(self, index: int) -> None:
        while True:
            try:
                self._processes[index] = self._fork_server.fork()
                return
            except OSError as error:
                _log.error("cannot start a compile process, will try again: %s", error)
                time.sleep(_RETRY_SECONDS)

    def _kill(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.kill()

    def _attempt_safely(self, task: _CompileTask, process: CompileProcess) -> bool:
        try:
            return self._attempt(task, process)
        except Exception as error:  # a bug here fails one constraint and does not end the thread
            _log.exception("a constraint was not compiled")
            process.kill()
            self._finish(task, BackendError(bounded(f"compiling failed: {error!r}")))
            return False

    def _attempt(self, task: _CompileTask, process: CompileProcess) -> bool:
        """Begin an attempt, or go on with one. Returns False if `process` was killed or handed over."""
        try:
            if task.process is None:
                task.began = time.monotonic()
                process.start(CompileRequest(task.constraint, task.backend, self._limits.grammar_bytes))
            task.process = None
            time_slice = _SLICES[task.level] if self._has_slow and task.level < _FINAL_LEVEL else None
            deadline = task.began + self._attempt_seconds(task)
            result = process.wait(deadline, self._limits.memory_bytes, time_slice)
        except TimeSliceExceeded:
            self._queue.record_slice(task, exceeded=True)
            if not self._queue.hand_over(task, process):
                process.kill()
                task.end_attempt()
                task.level += 1
                self._queue.put(task)
            return False
        except ProcessLost as lost:
            self._retry_lost(task, process, lost)
            return False
        except GuidedError as error:
            self._end_process(task, process, error)
            return False
        task.end_attempt()
        if task.level < _FINAL_LEVEL:
            self._queue.record_slice(task, exceeded=False)
        if result.error is None:
            result.seconds, result.crashed, result.timed_out = task.spent, task.crashed, task.timed_out
            task.future.set_result(result)
        else:
            self._fail_backend(task, from_wire(result.error))
        if process.growth > _MAX_GROWTH_BYTES:
            process.kill()
            return False
        return True

    def _attempt_seconds(self, task: _CompileTask) -> float:
        """Time limit of this attempt: all that is left, except the reserve for the backends after this one."""
        backends_after = len(task.backends) - len(task.failed) - 1
        return self._limits.seconds * (1 - _RESERVE * backends_after) - task.spent

    def _retry_lost(self, task: _CompileTask, process: CompileProcess, lost: ProcessLost) -> None:
        """Try the task again, unless it has lost too many processes."""
        task.lost += 1
        if task.lost == _MAX_LOST:
            ended = f"compiling this constraint ended its process ({lost}), {_MAX_LOST} times"
            self._end_process(task, process, BackendError(ended))
            return
        process.kill()
        task.end_attempt()
        task.level = 0
        self._queue.put(task)

    def _end_process(self, task: _CompileTask, process: CompileProcess, error: GuidedError) -> None:
        """Kill the process of an attempt that crashed or exceeded a limit."""
        task.end_attempt()
        process.kill()
        name = task.backend
        if isinstance(error, CompileTimeout):
            task.timed_out.append(name)
            error = CompileTimeout(
                f"compiling this constraint took more than {task.spent:.2g} s, at last with {name}; "
                "try a simpler one, or another backend"
            )
        elif isinstance(error, BackendError):
            task.crashed.append(name)
            _log.warning("%s, compiling with %s: %s", error, name, task.constraint.key)
        elif isinstance(error, ConstraintTooLarge):
            error = ConstraintTooLarge(f"with {name}, {error.message}")
        self._fail_backend(task, error)

    def _fail_backend(self, task: _CompileTask, error: GuidedError) -> None:
        """Try the next backend; without one, or if the constraint itself is wrong, finish with an error."""
        if not is_about_backend(error):
            self._finish(task, error)
            return
        task.failed.append((task.backend, error))
        if len(task.failed) == len(task.backends):
            self._finish(task, conclusion(task.failed))
            return
        task.level = 1  # after constraints that were not tried at all, before those that are known to be slow
        self._queue.put(task)

    def _finish(self, task: _CompileTask, error: GuidedError) -> None:
        task.future.set_result(
            CompileResult(to_wire(error), seconds=task.spent, crashed=task.crashed, timed_out=task.timed_out)
        )


class _CompileQueue:
    """Tasks in levels, first in, first out within each. Quick constraints never wait for slow ones. Thread-safe.

    The cost of a constraint cannot be known in advance. So every task first gets a time slice of `_SLICES[0]`, then one
    of `_SLICES[1]`, in the quick processes. A task that is still not finished goes to the slow processes, each of which
    compiles one task to its end.

    If a slow process is free, a task that has exceeded its first slice goes on there without being killed. A backend is
    served after the others while its latest tasks have all exceeded their slices. So a flood of constraints that one
    backend is slow at costs the users of another backend a few slices, whatever its length.

    Args:
        has_slow: some threads take only tasks of the final level. If not, every thread takes any task.
    """

    def __init__(self, has_slow: bool) -> None:
        self._has_slow = has_slow
        self._levels: tuple[deque[_CompileTask], ...] = tuple(deque() for _ in range(_FINAL_LEVEL + 1))
        self._changed = threading.Condition()
        self._idle_slow = 0
        """Threads of slow processes that wait in `take`."""
        self._closed = False
        self._exceeded: Counter[tuple[int, str]] = Counter()
        """By level and backend: the number of consecutive latest slices that were exceeded."""

    def put(self, task: _CompileTask) -> None:
        with self._changed:
            self._levels[task.level].append(task)
            self._changed.notify_all()

    def hand_over(self, task: _CompileTask, process: CompileProcess) -> bool:
        """Give a task and its running process to the thread of a slow process. Returns False if all are busy."""
        with self._changed:
            if self._idle_slow <= len(self._levels[_FINAL_LEVEL]):
                return False
            task.process, task.level = process, _FINAL_LEVEL
            self._levels[_FINAL_LEVEL].append(task)
            self._changed.notify_all()
            return True

    def take(self, *, slow: bool) -> _CompileTask | None:
        """Wait for the next task. None once the queue is closed."""
        levels = range(_FINAL_LEVEL + 1)
        if self._has_slow:
            levels = levels[_FINAL_LEVEL:] if slow else levels[:_FINAL_LEVEL]
        with self._changed:
            self._idle_slow += slow
            try:
                while not self._closed:
                    for level in levels:
                        if self._levels[level]:
                            return self._next(level)
                    self._changed.wait()
            finally:
                self._idle_slow -= slow
        return None

    def record_slice(self, task: _CompileTask, *, exceeded: bool) -> None:
        """Record whether a task exceeded its time slice at its level."""
        with self._changed:
            key = task.level, task.backend
            self._exceeded[key] = self._exceeded[key] + 1 if exceeded else 0

    def close(self) -> list[_CompileTask]:
        """End every `take`. Returns the tasks that were waiting."""
        with self._changed:
            self._closed = True
            waiting = [task for level in self._levels for task in level]
            for level in self._levels:
                level.clear()
            self._changed.notify_all()
        return waiting

    def _next(self, number: int) -> _CompileTask:
        level = self._levels[number]
        for index, task in enumerate(level):
            if self._exceeded[number, task.backend] < _SLOW_AFTER:
                del level[index]
                return task
        return level.popleft()
