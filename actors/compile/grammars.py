"""Grammars of a pool: compiled once by the compile actor, installed on every mask actor, forgotten when unused.

One thread does it all, so that neither the engine's thread nor a callback of Ray's ever waits for Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from actors.compile.loading import ActorHandle, GrammarPackage, Loading, StoredGrammar, ended_by, to_chunks
from actors.compile.process import CompileResult
from actors.compile.suspensions import Suspensions
from guided.backends import BACKENDS
from guided.compilation import grammar_key
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    BackendSuspended,
    CompileQueueFull,
    GuidedError,
    PoolUnavailable,
    bounded,
    from_wire,
)
from guided.grammar_cache import CacheKey, GrammarCache, cache_key
from guided.pool import BackendStatus, Grammar

__all__ = ["Grammars"]

_GRACE_SECONDS = 1.0
"""How long a grammar that some worker has waits for workers that are slow to load it."""
_LOAD_SECONDS = 15.0
"""How long an actor may take for one grammar. (Compiling one takes less, or it is ended.)"""
_COMPILE_TRIES = 10
"""Compile actors that may die with a constraint before it is given up. It is none of its doing: what one of them does
with a constraint it does in processes of its own."""
_COMPILE_PATIENCE = 60.0
"""Seconds after which none more may."""
_TICK_SECONDS = 0.5
_START_SECONDS = 60.0
"""How long the compile actor may take to answer its first ping: it may be starting."""
_PULSE_SECONDS = 15.0
"""How long for the others."""
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(eq=False, slots=True)
class _PendingInstall:
    """A compiled grammar whose future waits for the workers that are to have it."""

    grammar: Grammar
    stored: StoredGrammar
    since: float
    """`time.monotonic()` when it was compiled, or asked for again."""


@dataclass(eq=False, slots=True)
class _Retries:
    """How often a constraint was lost with the compile actor."""

    since: float = field(default_factory=time.monotonic)
    lost: int = 0


class Grammars:
    """Compiles, caches, installs.

    Args:
        start_compiler: makes a `CompileActor` and returns Ray's handle of it.
        max_cache_bytes: what grammars that nobody uses may weigh together.
        max_compiling: constraints under way; more are refused with `CompileQueueFull`.
        pool_wait: seconds that a compiled grammar waits for a worker while none is up.
        refused: is told which grammars no worker loads any more, by their keys, and why.
    """

    def __init__(
        self,
        start_compiler: Callable[[], Any],
        max_cache_bytes: int,
        max_compiling: int,
        pool_wait: float,
        refused: dict[str, GuidedError],
    ) -> None:
        self._start_compiler = start_compiler
        self._compiler = start_compiler()
        self._cache = GrammarCache(max_cache_bytes)
        self._cache_lock = threading.Lock()
        self._pending: dict[CacheKey, Future[Grammar]] = {}
        self._max_compiling = max_compiling
        self._pool_wait = pool_wait
        self._refused = refused
        self._suspensions = Suspensions(BACKENDS)
        self._closed = False
        # From here on: the thread's own.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loading = Loading(self._when_done, self._check_arrivals, refused)
        self._arrivals: list[_PendingInstall] = []
        self._pulse: tuple[Future[Any], float] | None = None
        self._compiler_pid: int | None = None
        """Once it has answered."""
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    @property
    def compiling(self) -> int:
        """Constraints that are being compiled or installed, or wait for it."""
        return len(self._pending)

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """See `MaskPool.compile`. Returns at once."""
        try:
            backends = self._suspensions.admitted(backends)
        except BackendSuspended as error:
            return _failed(error)
        key = cache_key(constraint, backends)
        with self._cache_lock:
            if self._closed:
                return _failed(PoolUnavailable("the pool is shut down"))
            future, new = self._cache.acquire(key)
            if new and len(self._pending) >= self._max_compiling:
                full = CompileQueueFull(
                    f"{len(self._pending)} constraints are being compiled or wait for it: try again"
                )
                self._cache.fail(key, full)
                return _failed(full)
            if new:
                task = partial(self._compile, key, constraint, list(backends))
            elif not self._is_homeless(future):
                return future
            elif (waiting := self._pending.get(key)) is not None:
                return waiting
            else:
                # Compiled once, and since then all workers that had it are gone.
                task = partial(self._bring_home, future.result(), constraint, list(backends))
                future = Future()
            future.set_running_or_notify_cancel()  # it is shared: nobody may cancel it
            self._pending[key] = future
        self._tasks.put(task)
        return future

    def let_go(self) -> None:
        """Ray's shared memory is gone, and the dumped grammars with it: forget them. From any thread."""
        self._tasks.put(self._loading.let_go)

    def backends(self) -> list[BackendStatus]:
        """Which backends are in rotation; from any thread."""
        return self._suspensions.status()

    def _is_homeless(self, future: Future[Grammar]) -> bool:
        """It is compiled, and no worker that takes sequences has it."""
        if not future.done() or future.exception() is not None:
            return False
        key = future.result().key
        return not any(home.serving and key in home.installed for home in self._loading.homes)

    def release(self, grammar: Grammar) -> None:
        """See `MaskPool.release`. Returns at once."""
        with self._cache_lock:
            evicted = self._cache.release(grammar)
        if evicted:
            self._tasks.put(partial(self._loading.forget, evicted))

    def settle(self, home: ActorHandle, timeout: float) -> None:
        """A new worker: from now on it gets every grammar; returns when it has those in use, and those that may have
        ended another.

        Raises:
            PoolUnavailable: it didn't load them in time, or died of it.
        """
        deadline = time.monotonic() + timeout
        self._await(home, self._ask(partial(self._settle, home), timeout), deadline)
        while (suspect := self._ask(partial(self._loading.next_suspect, home), timeout)) is not None:
            self._await(home, [suspect], deadline)

    def _ask(self, question: Callable[[], _Answer], timeout: float) -> _Answer:
        """Have the thread answer."""
        answer: Future[_Answer] = Future()
        self._tasks.put(lambda: answer.set_result(question()))
        return answer.result(timeout)

    def _await(self, home: ActorHandle, loads: Sequence[Future[None]], deadline: float) -> None:
        missing = set(loads)
        while missing:
            done, missing = wait(missing, _TICK_SECONDS, FIRST_COMPLETED)
            if any(map(ended_by, done)):
                raise PoolUnavailable(f"it died while it loaded grammars ({len(missing) + 1} were left)")
            if missing and (home.overdue(_LOAD_SECONDS) or time.monotonic() > deadline):
                raise PoolUnavailable(f"{len(missing)} of {len(loads)} grammars were not loaded in time")

    def hangs(self, home: ActorHandle) -> bool:
        """Whether a worker has been loading one grammar for too long. From any thread."""
        return home.overdue(_LOAD_SECONDS)

    def serve(self, home: ActorHandle) -> None:
        """From now on sequences are placed on that worker: who waited for a worker with its grammar has one."""
        home.serving = True
        self._tasks.put(self._check_arrivals)

    def leave(self, home: ActorHandle) -> None:
        """That worker is gone."""
        self._tasks.put(partial(self._leave, home))

    def close(self) -> None:
        """Stop; what is still being compiled ends with `PoolUnavailable`. Idempotent."""
        with self._cache_lock:
            self._closed = True
        self._tasks.put(None)
        self._thread.join()
        for key in list(self._pending):
            self._fail(key, PoolUnavailable("the pool was shut down"))
        self._end_compiler()

    def compile_pids(self) -> list[int]:
        """The processes that compile. Asks the compile actor: takes milliseconds."""
        pids: list[int] = ray.get(self._compiler.pids.remote(), timeout=_START_SECONDS)
        return pids

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_SECONDS if self._pending else None)
            except queue.Empty:
                self._watch_compiler()
                self._check_arrivals()
                continue
            if task is None:
                return
            try:
                task()
            except Exception:
                _log.exception("a grammar task failed")

    def _compile(
        self, key: CacheKey, constraint: Constraint, backends: list[str], lives: _Retries | None = None
    ) -> None:
        compiler = self._compiler
        outcome, dumped = compiler.compile.options(num_returns=2).remote(backends, *to_chunks(constraint))
        again = partial(self._compile_again, key, constraint, backends, lives or _Retries(), compiler)
        self._when_done(outcome.future(), partial(self._compiled, key, constraint, dumped, again))

    def _compile_again(
        self, key: CacheKey, constraint: Constraint, backends: list[str], lives: _Retries, lost: Any
    ) -> None:
        """The compile actor died, with all it was asked. Nothing says that this constraint did it (native code runs in
        its children): it is asked for again."""
        lives.lost += 1
        seconds = time.monotonic() - lives.since
        if lives.lost == _COMPILE_TRIES or seconds > _COMPILE_PATIENCE:
            often = f"the compile actor died {lives.lost} times within {seconds:.0f} s while it had this constraint"
            self._fail(key, PoolUnavailable(often))
            return
        if self._compiler is lost:
            _log.error("the compile actor died: it is started again")
            try:
                self._compiler = self._start_compiler()
            except GuidedError as error:
                self._fail(key, error)
                return
            self._compiler_pid = self._pulse = None
        self._compile(key, constraint, backends, lives)

    def _compiled(
        self,
        key: CacheKey,
        constraint: Constraint,
        dumped: ray.ObjectRef,
        again: Callable[[], None],
        done: Future[CompileResult],
    ) -> None:
        try:
            outcome = done.result()
        except RayActorError:
            again()
            return
        except Exception as error:
            self._fail(key, PoolUnavailable(f"the compile actor failed: {bounded(error)}"))
            return
        for backend in outcome.crashed:
            self._suspensions.crashed(backend, constraint.key)
        for backend in outcome.timed_out:
            self._suspensions.timed_out(backend)
        if outcome.error is not None:
            self._fail(key, from_wire(outcome.error))
            return
        name = grammar_key(outcome.backend, constraint)
        grammar = Grammar(name, outcome.backend, constraint, key, outcome.seconds)
        with self._cache_lock:
            self._cache.weigh(grammar, outcome.nbytes)
        stored = self._loading.add(GrammarPackage(name, outcome.backend, to_chunks(constraint)), dumped)
        self._arrivals.append(_PendingInstall(grammar, stored, time.monotonic()))
        self._check_arrivals()

    def _bring_home(self, grammar: Grammar, constraint: Constraint, backends: list[str]) -> None:
        """A compiled grammar that no worker has is asked for again."""
        stored = self._loading.stored.get(grammar.key)
        if stored is None:
            self._compile(grammar.cache_key, constraint, backends)
            return
        self._loading.try_again(stored)
        self._arrivals.append(_PendingInstall(grammar, stored, time.monotonic()))
        self._check_arrivals()

    def _settle(self, home: ActorHandle) -> list[Future[None]]:
        with self._cache_lock:
            needed = {grammar.key for grammar in self._cache.in_use()}
        needed.update(arrival.grammar.key for arrival in self._arrivals)
        return self._loading.settle(home, needed)

    def _leave(self, home: ActorHandle) -> None:
        self._loading.leave(home)
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        waiting: list[_PendingInstall] = []
        now = time.monotonic()
        for arrival in self._arrivals:
            age = now - arrival.since
            homes = [home for home in self._loading.homes if not ended_by(arrival.stored.homes.get(home))]
            loads = [arrival.stored.homes[home] for home in homes if home in arrival.stored.homes]
            loaded = any(home.serving and arrival.grammar.key in home.installed for home in homes)
            if loaded and (age > _GRACE_SECONDS or all(load.done() for load in loads)):
                self._pending.pop(arrival.grammar.cache_key).set_result(arrival.grammar)
            elif (refusal := self._refused.get(arrival.grammar.key)) is not None:
                self._fail(arrival.grammar.cache_key, refusal)
            elif loads and all(load.done() and load.exception() is not None for load in loads):
                why = bounded(loads[0].exception())
                self._fail(arrival.grammar.cache_key, BackendError(f"no worker could load the grammar: {why}"))
            elif age > self._pool_wait:
                nobody = PoolUnavailable(f"no mask worker was there for it for {self._pool_wait:g} s")
                self._fail(arrival.grammar.cache_key, nobody)
            else:
                waiting.append(arrival)
        self._arrivals = waiting

    def _fail(self, key: CacheKey, error: GuidedError) -> None:
        with self._cache_lock:
            future = self._pending.pop(key)
            evicted = self._cache.fail(key, error)
        if evicted:
            self._loading.forget(evicted)
        future.set_exception(error)

    def _watch_compiler(self) -> None:
        """A compile actor that doesn't answer is killed; what it was asked fails then, and is asked of the next one."""
        now = time.monotonic()
        if self._pulse is None:
            self._pulse = self._compiler.pid.remote().future(), now
        elif self._pulse[0].done():
            if self._pulse[0].exception() is None:
                self._compiler_pid = self._pulse[0].result()
            self._pulse = None
        elif now - self._pulse[1] > (_START_SECONDS if self._compiler_pid is None else _PULSE_SECONDS):
            _log.error("the compile actor doesn't answer")
            self._end_compiler()

    def _end_compiler(self) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._compiler)
        if self._compiler_pid is not None:  # Ray asks it to end; it may be unable to
            _kill(self._compiler_pid, after=1.0)
        self._compiler_pid = self._pulse = None

    def _when_done(self, future: Future[Any], task: Callable[[Future[Any]], None]) -> None:
        future.add_done_callback(lambda done: self._tasks.put(partial(task, done)))


def _kill(pid: int, after: float) -> None:
    """Kill a process, if it doesn't end by itself within `after` seconds."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        gone = select.poll()
        gone.register(process, select.POLLIN)
        if not gone.poll(after * 1000):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def _failed(error: GuidedError) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_exception(error)
    return future
