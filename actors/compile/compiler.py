"""Compiler: distributes constraints to compile processes, and kills those that exceed a limit.

It runs in the engine's process. Native code runs in the compile processes only.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from actors.compile.child import CompileProcess, ForkServer
from actors.compile.process import CompileRequest, CompileResult
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

_RESERVE = 0.1
"""Share of the time limit kept for each backend that may still be tried: most reject, or finish, in far less."""
_MAX_GROWTH_BYTES = 64 << 20
"""A process that has grown by more than this is replaced after its constraint."""
_RETRY_SECONDS = 1.0
"""Pause before another attempt to start a compile process."""
_log = logging.getLogger(__name__)


class _Task(NamedTuple):
    """A constraint that waits for a process."""

    constraint: Constraint
    backends: Sequence[str]
    future: Future[CompileResult]
    submitted: float
    """`time.monotonic()`."""


class Compiler:
    """Warm compile processes, and a thread for each constraint that is being compiled. First come, first served."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._limits = limits
        self._queue: queue.Queue[_Task | None] = queue.Queue()
        self._fork_server = ForkServer(vocabulary.to_bytes())
        self._idle: list[CompileProcess] = []
        """The one that was used last is used next: under a light load there is one process."""
        self._busy: set[CompileProcess] = set()
        self._closing = threading.Event()
        count = limits.processes or max(4, min(16, available_cpus()))
        # The fork server dies with the thread that started it, which may be any of these: they all end together.
        self._end = threading.Barrier(count)
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, constraint: Constraint, backends: Sequence[str]) -> Future[CompileResult]:
        """Compile `constraint` with the first of `backends` that can enforce all of it, once a process is free.

        The future never raises: the `CompileResult` holds the error.
        """
        future: Future[CompileResult] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: a thread will set its result
        self._queue.put(_Task(constraint, backends, future, time.monotonic()))
        return future

    @property
    def pids(self) -> list[int]:
        """Pids of the compile processes."""
        return [process.pid for process in [*self._idle, *self._busy]]

    def close(self) -> None:
        """Fail all constraints that wait or are being compiled, and end the processes."""
        self._closing.set()
        for _ in self._threads:
            self._queue.put(None)
        self._fork_server.close()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        """Body of a thread: compile one constraint after the other."""
        if index == 0:  # warm up before the first constraint
            self._idle += filter(None, [self._take()])
        while (task := self._queue.get()) is not None:
            try:
                result = self._result(task)
            except Exception as error:  # a bug here fails one constraint and does not end the thread
                _log.exception("a constraint was not compiled")
                result = CompileResult(to_wire(BackendError(bounded(f"compiling failed: {error!r}"))))
            task.future.set_result(result)
        self._end.wait()

    def _take(self) -> CompileProcess | None:
        """Return an idle process, or a new one. None: the compiler is being closed."""
        while not self._closing.is_set():
            try:
                process = self._idle.pop()
            except IndexError:
                try:
                    return self._fork_server.fork()
                except OSError as error:
                    if not self._closing.is_set():
                        _log.error("cannot start a compile process, will try again: %s", error)
                        self._closing.wait(_RETRY_SECONDS)
            else:
                if process.alive:
                    return process
                process.kill()
        return None

    def _result(self, task: _Task) -> CompileResult:
        """Compile a constraint with one backend after the other, until one can enforce it."""
        waited = time.monotonic() - max(task.submitted, self._fork_server.started)
        if waited > self._limits.wait_seconds:
            text = f"this constraint waited {waited:.0f} s for others that are compiled; try again later"
            return CompileResult(to_wire(CompileQueueFull(text)))
        spent = 0.0
        failed: list[tuple[str, GuidedError]] = []
        crashed: list[str] = []
        timed_out: list[str] = []
        while len(failed) < len(task.backends):
            name = task.backends[len(failed)]
            share = 1 - _RESERVE * (len(task.backends) - len(failed) - 1)
            request = CompileRequest(task.constraint, name, self._limits.grammar_bytes)
            result, seconds = self._attempt(request, self._limits.seconds * share - spent)
            spent += seconds
            if isinstance(result, GuidedError):
                if isinstance(result, PoolUnavailable):
                    return CompileResult(to_wire(result))
                if isinstance(result, CompileTimeout):
                    timed_out.append(name)
                elif isinstance(result, BackendError):
                    crashed.append(name)
                    _log.warning("%s, compiling with %s: %s", result, name, task.constraint.key)
                failed.append((name, _described(result, name, spent)))
                continue
            if result.error is None:
                result.seconds, result.crashed, result.timed_out = spent, crashed, timed_out
                return result
            refusal = from_wire(result.error)
            failed.append((name, refusal))
            if not is_about_backend(refusal):  # but about the constraint
                failed = failed[-1:]
                break
        return CompileResult(to_wire(conclusion(failed)), seconds=spent, crashed=crashed, timed_out=timed_out)

    def _attempt(self, request: CompileRequest, seconds: float) -> tuple[CompileResult | GuidedError, float]:
        """Compile with one backend, in an idle process or a new one.

        Args:
            seconds: time limit, without the time that a new process takes to start.

        Returns:
            The result, or why the process was killed or ended; and the seconds that it took.
        """
        process = self._take()
        if process is None:
            return _closed(), 0.0
        self._busy.add(process)
        began = time.monotonic()
        result: CompileResult | GuidedError
        is_reusable = False
        try:
            result = process.compile(request, began + seconds, self._limits.memory_bytes)
            is_reusable = process.growth <= _MAX_GROWTH_BYTES
        except GuidedError as error:
            result = _closed() if self._closing.is_set() else error
        finally:  # also if the answer is garbled
            self._busy.discard(process)
            if is_reusable:
                self._idle.append(process)
            else:
                process.kill()
        return result, time.monotonic() - began


def _closed() -> PoolUnavailable:
    return PoolUnavailable("the pool is shut down")


def _described(error: GuidedError, name: str, seconds: float) -> GuidedError:
    """Return the error of an attempt with the backend's name."""
    if isinstance(error, CompileTimeout):
        return CompileTimeout(
            f"compiling this constraint took more than {seconds:.2g} s, at last with {name}; "
            "try a simpler one, or another backend"
        )
    return ConstraintTooLarge(f"with {name}, {error.message}") if isinstance(error, ConstraintTooLarge) else error
