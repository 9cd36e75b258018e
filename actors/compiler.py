"""Compiler: compiles constraints in processes that can be killed, and caches the
grammars.

It runs in the engine's process. Native code runs in the compile processes only.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from actors.compile_process import CompileProcesses, CompileRequest, closed
from actors.compile_queue import CompileQueue, Task
from actors.processes import TICK_SECONDS
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileQueueFull,
    CompileTimeout,
    GuidedError,
    from_wire,
)
from guided.masks.compilation import first_able
from guided.masks.resources import available_cpus
from guided.pools.grammar_cache import GrammarCache
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import CLIENT, Grammar
from guided.pools.status import BackendStatus
from guided.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class Compiler:
    """A thread for each constraint that is being compiled, the queue, and the cache.
    For any thread."""

    def __init__(self, vocabulary: Vocabulary, options: RayPoolOptions) -> None:
        self._limits = options.compile_limits
        self._lock = threading.Lock()
        """Protects the queue, the counters, and `_closing`."""
        self._cache = GrammarCache(options.max_cache_bytes)
        self._ends: Counter[tuple[str, type[GuidedError]]] = Counter()
        """Ends of compile processes by backend and error."""
        self._closing = threading.Event()
        self._processes = CompileProcesses(vocabulary.to_bytes(), self._closing)
        self._queue = CompileQueue(self._limits.waiting)
        self._most = self._limits.processes or max(4, min(16, available_cpus()))
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def compile(
        self, constraint: Constraint, backends: Sequence[str]
    ) -> Future[Grammar]:
        return self._cache.get(
            constraint, backends, partial(self._enqueue, constraint, backends)
        )

    def _enqueue(
        self, constraint: Constraint, backends: Sequence[str], key: str
    ) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        # shared by several requests: cannot be cancelled
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closing.is_set():
                future.set_exception(closed())
                return future
            refused = self._queue.put(
                Task(constraint, backends, key, future, CLIENT.get(), time.monotonic())
            )
            self._start_next()
        if refused is not None:
            error = CompileQueueFull(
                f"{self._limits.waiting} constraints wait to be compiled: try again later"
            )
            refused.future.set_exception(error)
        return future

    def backends(self) -> list[BackendStatus]:
        """Return how often each backend has crashed or exceeded a time limit."""
        return [
            BackendStatus(
                name, self._ends[name, BackendError], self._ends[name, CompileTimeout]
            )
            for name in BACKENDS
        ]

    def counts(self) -> dict[str, int]:
        """Return numbers of `PoolStatus`."""
        cache = self._cache
        return {
            "compiling": cache.compiling,
            "cache_hits": cache.hits,
            "shared_compilations": cache.shared,
            "fork_server_ends": self._processes.ends,
        }

    def close(self) -> None:
        """End the processes. Constraints that wait or are being compiled fail with
        `PoolUnavailable`."""
        with self._lock:
            self._closing.set()
            left = self._queue.expired(math.inf)
            running = [task.future for task in self._queue.running]
        for task in left:
            task.future.set_exception(closed())
        self._keeper.join()
        self._processes.close()
        wait(running)

    def _keep(self) -> None:
        """Body of a thread: keep fork servers, which end with this thread, and refuse
        what has waited too long."""
        warm_since = time.monotonic()
        while not self._closing.wait(TICK_SECONDS):
            with self._lock:
                self._start_next()
            try:
                self._processes.keep(is_quiet=not self._queue.running)
            except OSError as error:
                # This thread must not end: it would take all compile processes with it.
                _log.error(
                    "cannot start a fork server of the compile processes, will try again: %s",
                    error,
                )
            now = time.monotonic()
            if self._processes.are_starting:
                warm_since = now
            # constraints waited for the first fork server
            if now < warm_since + self._limits.wait_seconds:
                continue
            with self._lock:
                expired = self._queue.expired(now - self._limits.wait_seconds)
            for task in expired:  # without the lock: the cache has one too
                task.future.set_exception(self._waited())

    def _waited(self) -> CompileQueueFull:
        return CompileQueueFull(
            f"this constraint waited {self._limits.wait_seconds:g} s for others: try again later"
        )

    def _start_next(self) -> None:
        """Start the next constraints, while processes are free for them. With the
        lock."""
        while len(self._queue.running) < self._most:
            task = self._queue.take()
            if task is None:
                return
            try:
                threading.Thread(target=self._work, args=(task,), daemon=True).start()
            except RuntimeError as error:
                # Too many threads: it waits until one can be started, or expires.
                _log.error("a constraint is not compiled now: %s", error)
                self._queue.put_back(task)
                return

    def _work(self, task: Task) -> None:
        """Body of a thread: compile a constraint."""
        try:
            task.future.set_result(self._compile(task))
        except GuidedError as error:
            task.future.set_exception(error)
        except Exception as raised:  # a bug, or a garbled answer: fails one constraint
            _log.exception("a constraint was not compiled")
            task.future.set_exception(
                BackendError(f"compiling failed: {type(raised).__name__}")
            )
        with self._lock:
            self._queue.running.remove(task)
            self._start_next()

    def _compile(self, task: Task) -> Grammar:
        """Compile with the first backend that can enforce all of a constraint."""
        limit = left = self._limits.seconds
        """Seconds, without the time that processes take to start."""

        def attempt(name: str) -> Grammar:
            nonlocal left
            try:
                process = self._processes.take(
                    task.submitted + self._limits.wait_seconds
                )
            except TimeoutError:
                raise self._waited() from None
            # A tenth of the time limit is kept for each backend that may still be
            # tried: most need far less.
            kept = 0.1 * limit * (len(task.backends) - task.backends.index(name) - 1)
            request = CompileRequest(task.constraint, name, self._limits.grammar_bytes)
            began = time.monotonic()
            try:
                result, package = process.compile(
                    request, left - kept, self._limits.memory_bytes
                )
            except GuidedError as error:
                if self._closing.is_set():
                    raise closed() from None
                with self._lock:
                    self._ends[name, type(error)] += 1
                _log.warning(
                    "%s, compiling with %s: %s", error, name, task.constraint.key
                )
                raise
            finally:  # also if the answer is garbled
                left -= time.monotonic() - began
                self._processes.release(process)
            if result.error is not None:
                raise from_wire(result.error)
            checked = result.checked
            size = result.nbytes
            return Grammar(
                task.key,
                name,
                task.constraint,
                limit - left,
                checked=checked,
                nbytes=size,
                dumped=package,
            )

        return first_able(task.backends, attempt)
