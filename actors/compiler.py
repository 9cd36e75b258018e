"""CompileActor: owns the processes that compile, and kills those that take too long or too much.

One actor for the pool, with children, rather than a child a mask actor: a mask actor's death then ends no compilation,
a compilation can't starve a mask actor of memory, and whoever has to kill a child runs beside it and never native code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import psutil
import ray

from actors.compile_process import Job, Outcome
from actors.frames import read_frame, readable, write_frame
from actors.owner import Owner, exit_with
from guided.constraint import Constraint
from guided.errors import BackendError, CompileTimeout, ConstraintTooLarge, GuidedError, to_wire
from guided.messages import decoder, encode
from guided.vocabulary import Vocabulary

__all__ = ["CompileActor", "CompileLimits", "Compiler"]

_WARM_UP_SECONDS = 120.0
_MEMORY_CHECK_SECONDS = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What one compilation may take, and how many run at once."""

    processes: int = 2
    seconds: float = 10.0
    memory_bytes: int = 3 << 30
    """Resident memory of a compile process, everything that is warm in it included."""


class CompileActor:
    """The compiler, as Ray sees it. Async, so that waiting compilations cost no thread.

    Args:
        owner: the engine's process; this one ends with it.
    """

    def __init__(self, owner: Owner, limits: CompileLimits) -> None:
        exit_with(owner)
        self._compiler = Compiler(ray.get(owner.vocabulary), limits)

    async def compile(self, constraint: Constraint, backends: Sequence[str]) -> tuple[Outcome, bytes]:
        """The outcome, and beside it (an object of its own, so that it needn't visit the engine) the dumped grammar."""
        outcome = await asyncio.wrap_future(self._compiler.submit(Job(constraint, list(backends))))
        return Outcome(outcome.error, outcome.backend, outcome.seconds, outcome.nbytes), outcome.dumped

    async def pids(self) -> list[int]:
        """The compile processes; also the sign that this actor is alive."""
        return self._compiler.pids


class Compiler:
    """`limits.processes` warm children, each with a thread that feeds it, watches it and replaces it."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._limits = limits
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Outcome]] | None] = queue.SimpleQueue()
        self._children: dict[int, _Child] = {}
        packed = vocabulary.to_bytes()
        # A child dies with the thread that started it: these threads live as long as the children are needed.
        self._threads = [
            threading.Thread(target=self._keep, args=(index, packed), name=f"compile-{index}", daemon=True)
            for index in range(limits.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Outcome]:
        """Compile when a child is free. The future never raises: an `Outcome` holds the error."""
        future: Future[Outcome] = Future()
        self._jobs.put((job, future))
        return future

    @property
    def pids(self) -> list[int]:
        """The children that are there."""
        return [child.pid for child in list(self._children.values())]

    def close(self) -> None:
        """End the children that have nothing to do, and those that are busy when they are done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _keep(self, index: int, vocabulary: bytes) -> None:
        closing = False
        while not closing:
            child = _Child()
            self._children[index] = child
            try:
                child.warm_up(vocabulary)
            except (OSError, EOFError, TimeoutError) as error:
                _log.error("a compile process didn't start: %r", error)
                child.kill()
                time.sleep(1.0)
                continue
            closing = self._feed(child)
            child.kill()

    def _feed(self, child: _Child) -> bool:
        """Give `child` jobs until it is spoiled; True where there will be none any more."""
        healthy = True
        while healthy:
            task = self._jobs.get()
            if task is None:
                return True
            if not child.alive:
                self._jobs.put(task)
                return False
            job, future = task
            try:
                outcome = child.run(job, self._limits)
                # What a compilation leaves behind must not count against the next one.
                healthy = child.rss < self._limits.memory_bytes / 2
            except GuidedError as error:
                outcome, healthy = Outcome(error=to_wire(error)), False
            future.set_result(outcome)
        return False


class _Child:
    """One compile process. Used by the thread that made it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.compile_process", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        self._decode = decoder(Outcome).decode

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def rss(self) -> int:
        """Resident bytes; 0 where it is gone."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    def warm_up(self, vocabulary: bytes) -> None:
        write_frame(self._jobs, vocabulary)
        read_frame(self._answers, time.monotonic() + _WARM_UP_SECONDS)

    def run(self, job: Job, limits: CompileLimits) -> Outcome:
        """One compilation.

        Raises:
            CompileTimeout, ConstraintTooLarge, BackendError: it was killed, or died; so was this child.
        """
        deadline = time.monotonic() + limits.seconds
        try:
            write_frame(self._jobs, encode(job))
            while not readable(self._answers, min(_MEMORY_CHECK_SECONDS, deadline - time.monotonic())):
                if self.rss > limits.memory_bytes:
                    raise ConstraintTooLarge(
                        f"compiling this constraint took more than {limits.memory_bytes >> 20} MiB of memory; "
                        "a smaller one, or another backend, may do"
                    )
                if time.monotonic() >= deadline:
                    raise TimeoutError
            outcome: Outcome = self._decode(read_frame(self._answers, deadline))
        except TimeoutError:
            raise CompileTimeout(
                f"compiling this constraint took more than {limits.seconds:g} s; "
                "a simpler one, or another backend, may do"
            ) from None
        except (EOFError, OSError):
            raise BackendError(f"compiling this constraint ended its process ({self._how_it_ended()})") from None
        return outcome

    def kill(self) -> None:
        """End it, whatever it does. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
