"""CompileActor: owns the compile processes, distributes constraints to them and kills those that exceed a limit.

The pool has one such actor. It never runs native code itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

from msgspec.msgpack import Decoder

from actors.compile.child import CompileProcess, ForkServer, ProcessLost
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


class _Task(NamedTuple):
    """A constraint that waits for a process."""

    constraint: Constraint
    backends: Sequence[str]
    future: Future[CompileResult]
    submitted: float
    """`time.monotonic()`."""


class CompileActor:
    """The compiler as a Ray actor. Its methods are async, so that a waiting compilation occupies no thread.

    Args:
        owner: the engine's process; this process ends with it.
    """

    RAY_OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, owner: ProcessLocation, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        exit_with_owner(owner)
        self._compiler = Compiler(vocabulary, limits)

    async def compile(self, constraint: bytes, backends: Sequence[str], waited: float) -> CompileResult:
        """Compile a constraint that has waited for `waited` seconds."""
        return await asyncio.wrap_future(self._compiler.submit(_decode(constraint), backends, waited))

    async def pids(self) -> list[int]:
        """Return the pids of the compile processes."""
        return self._compiler.pids

    async def location(self) -> ProcessLocation:
        """Return where this actor runs; also shows that it is alive."""
        return ProcessLocation.of_this_actor()


class Compiler:
    """Warm compile processes, each with a thread that feeds, watches and replaces it. First come, first served."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._limits = limits
        count = limits.processes or max(4, min(16, available_cpus()))
        self._queue: queue.Queue[_Task | None] = queue.Queue()
        self._fork_server = ForkServer(vocabulary.to_bytes())
        self._processes: dict[int, CompileProcess] = {}
        """By thread."""
        # The fork server dies with the thread that started it, which may be any of these: they all end together.
        self._end = threading.Barrier(count)
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, constraint: Constraint, backends: Sequence[str], waited: float = 0.0) -> Future[CompileResult]:
        """Compile `constraint` with the first of `backends` that can enforce all of it, once a process is free.

        The future never raises: the `CompileResult` holds the error.
        """
        future: Future[CompileResult] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: a thread will set its result
        self._queue.put(_Task(constraint, backends, future, time.monotonic() - waited))
        return future

    @property
    def pids(self) -> list[int]:
        """Pids of the compile processes."""
        return [process.pid for process in list(self._processes.values())]

    def close(self) -> None:
        """Fail the constraints that wait, finish those that are being compiled, end the processes."""
        with contextlib.suppress(queue.Empty):
            while (task := self._queue.get_nowait()) is not None:
                task.future.set_result(CompileResult(to_wire(PoolUnavailable("the compiler was shut down"))))
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._fork_server.close()

    def _work(self, index: int) -> None:
        """Body of a thread: compile one constraint after the other in the thread's own process."""
        self._process(index)
        while (task := self._queue.get()) is not None:
            try:
                result = self._result(index, task)
            except Exception as error:  # a bug here fails one constraint and does not end the thread
                _log.exception("a constraint was not compiled")
                self._kill(index)
                result = CompileResult(to_wire(BackendError(bounded(f"compiling failed: {error!r}"))))
            task.future.set_result(result)
            self._process(index)
        self._kill(index)
        self._end.wait()

    def _process(self, index: int) -> CompileProcess:
        """Return the live process of a thread; starts one if there is none."""
        process = self._processes.get(index)
        if process is not None and process.alive:
            return process
        self._kill(index)
        while True:
            try:
                process = self._processes[index] = self._fork_server.fork()
                return process
            except OSError as error:
                _log.error("cannot start a compile process, will try again: %s", error)
                time.sleep(_RETRY_SECONDS)

    def _kill(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.kill()

    def _result(self, index: int, task: _Task) -> CompileResult:
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
            result, seconds = self._attempt(index, request, self._limits.seconds * share - spent)
            spent += seconds
            if isinstance(result, GuidedError):
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

    def _attempt(
        self, index: int, request: CompileRequest, seconds: float
    ) -> tuple[CompileResult | GuidedError, float]:
        """Compile with one backend. A process that was killed from outside is replaced, and the attempt repeated.

        Args:
            seconds: time limit, without the time that new processes take to start.

        Returns:
            The result, or why the process was killed or crashed; and the seconds that it took.
        """
        spent = 0.0
        for _ in range(_MAX_LOST):
            process = self._process(index)
            began = time.monotonic()
            result: CompileResult | GuidedError | None = None
            try:
                process.start(request)
                result = process.wait(began + seconds - spent, self._limits.memory_bytes)
            except ProcessLost as error:
                lost = error
            except GuidedError as error:
                result = error
            spent += time.monotonic() - began
            if not isinstance(result, CompileResult) or process.growth > _MAX_GROWTH_BYTES:
                self._kill(index)
            if result is not None:
                return result, spent
        return BackendError(f"compiling this constraint ended its process ({lost}), {_MAX_LOST} times"), spent


def _described(error: GuidedError, name: str, seconds: float) -> GuidedError:
    """Return the error of an attempt with the backend's name."""
    if isinstance(error, CompileTimeout):
        return CompileTimeout(
            f"compiling this constraint took more than {seconds:.2g} s, at last with {name}; "
            "try a simpler one, or another backend"
        )
    return ConstraintTooLarge(f"with {name}, {error.message}") if isinstance(error, ConstraintTooLarge) else error
