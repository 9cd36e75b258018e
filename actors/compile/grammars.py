"""Grammars of a pool: compiled once by the compile actor, cached by bytes. Mask actors load them at first use.

One thread talks to the compile actor, so that neither the engine's thread nor a callback of Ray ever waits for Ray.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec.msgpack import encode

from actors.cluster import Cluster
from actors.compile.process import CompileResult
from actors.driver.client import ActorDied, ActorFailed, RemoteActor
from actors.driver.scheduling import Scheduling
from actors.processes import ProcessHandle, ProcessLocation, kill_actor
from guided.backends import BACKENDS
from guided.compilation import grammar_key
from guided.constraint import Constraint
from guided.errors import CompileQueueFull, CompileTimeout, GuidedError, PoolUnavailable, bounded, from_wire
from guided.pools.grammar_cache import CacheKey, GrammarCache, cache_key
from guided.pools.options import NodePlacement, RayPoolOptions
from guided.pools.protocol import BackendStatus, Grammar
from guided.vocabulary import Vocabulary

_TICK_SECONDS = 0.5
_CREATE_SECONDS = 10.0
_GRACE_SECONDS = 15.0
"""The compile actor keeps the time limits by itself. One that has not answered this long after them is replaced."""
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pending:
    """A constraint that is being compiled."""

    constraint: Constraint
    backends: list[str]
    future: Future[Grammar]
    since: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when it was requested."""
    asked: RemoteActor | None = None
    """The compile actor that has it; None: it waits for one."""


class Grammars:
    """Compiles and caches grammars. Its methods may be called from any thread.

    Args:
        when_unused: called with the keys of grammars that the cache has dropped.
    """

    def __init__(
        self,
        cluster: Cluster,
        vocabulary: Vocabulary,
        options: RayPoolOptions,
        when_unused: Callable[[Collection[str]], None],
    ) -> None:
        self._cluster = cluster
        self._vocabulary = vocabulary
        self._options = options
        self._when_unused = when_unused
        limits = options.compile_limits
        self._seconds = limits.seconds + limits.wait_seconds
        """Time limit of a constraint, from its request on."""
        self._lock = threading.Lock()
        self._cache = GrammarCache(options.max_cache_bytes)
        self._pending: dict[CacheKey, _Pending] = {}
        self._crashes: Counter[str] = Counter()
        self._timeouts: Counter[str] = Counter()
        self._closed = False
        # The following belong to the thread.
        self._actor: RemoteActor | None = self._start_actor()
        self._location: Future[ProcessLocation] = self._actor.call("location")
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    @property
    def compiling(self) -> int:
        """Number of constraints that are being compiled, or wait for it."""
        return len(self._pending)

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """See `MaskPool.compile`. Returns at once."""
        key = cache_key(constraint, backends)
        with self._lock:
            if self._closed:
                return _failed(PoolUnavailable("the pool is shut down"))
            future, new = self._cache.acquire(key)
            if not new:
                return future
            if len(self._pending) >= self._options.max_compiling:
                full = CompileQueueFull(f"{len(self._pending)} constraints are being compiled or waiting: try again")
                self._cache.fail(key, full)
                return _failed(full)
            future.set_running_or_notify_cancel()  # shared by several requests: cannot be cancelled
            pending = self._pending[key] = _Pending(constraint, list(backends), future)
        self._tasks.put(partial(self._ask, key, pending))
        return future

    def release(self, grammar: Grammar) -> None:
        """See `MaskPool.release`. Returns at once."""
        with self._lock:
            self._drop(self._cache.release(grammar))

    def backends(self) -> list[BackendStatus]:
        """Return how often each backend has crashed or exceeded a time limit."""
        return [BackendStatus(name, self._crashes[name], self._timeouts[name]) for name in BACKENDS]

    def compile_pids(self) -> list[int]:
        """Ask the compile actor for the pids of its processes; takes milliseconds."""
        actor = self._actor
        pids: list[int] = [] if actor is None else actor.call("pids").result(_CREATE_SECONDS)
        return pids

    def close(self) -> None:
        """Stop; pending compilations fail with `PoolUnavailable`."""
        with self._lock:
            self._closed = True
        self._tasks.put(None)
        self._thread.join()
        for key in list(self._pending):
            self._fail(key, PoolUnavailable("the pool was shut down"))
        self._end_actor()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_SECONDS if self._pending else None)
            except queue.Empty:
                task = self._check
            if task is None:
                return
            try:
                task()
            except Exception:
                _log.exception("a grammar task failed")

    def _ask(self, key: CacheKey, pending: _Pending) -> None:
        """Have the compile actor compile a constraint. Starts another actor if there is none."""
        if self._actor is None:
            try:
                self._actor = self._start_actor()
                self._location = self._actor.call("location")
            except PoolUnavailable:  # tried again by `_check`; `Cluster` says what is wrong with Ray
                return
        pending.asked = self._actor
        waited = time.monotonic() - pending.since
        answer = self._actor.call("compile", encode(pending.constraint), pending.backends, waited)
        answer.add_done_callback(lambda done: self._tasks.put(partial(self._answered, key, pending, done)))

    def _answered(self, key: CacheKey, pending: _Pending, done: Future[CompileResult]) -> None:
        if self._pending.get(key) is not pending:
            return
        try:
            result = done.result()
        except ActorDied:
            if self._actor is pending.asked:
                _log.error("the compile actor died: it is started again")
                self._actor = None
            pending.asked = None
            self._ask(key, pending)
            return
        except Exception as error:
            self._fail(key, PoolUnavailable(f"the compile actor failed: {bounded(error)}"))
            return
        self._crashes.update(result.crashed)
        self._timeouts.update(result.timed_out)
        if result.error is not None:
            self._fail(key, from_wire(result.error))
            return
        grammar = Grammar(
            grammar_key(result.backend, pending.constraint),
            result.backend,
            pending.constraint,
            key,
            result.seconds,
            checked=tuple(result.checked),
            mask_seconds=result.mask_seconds,
            dumped=result.dumped,
        )
        with self._lock:
            self._drop(self._cache.admit(grammar, result.nbytes))
            del self._pending[key]
        pending.future.set_result(grammar)

    def _check(self) -> None:
        """Ask again for what waits for a compile actor, and end one that does not answer."""
        now = time.monotonic()
        for key, pending in list(self._pending.items()):
            waited = now - pending.since
            if pending.asked is None and waited > self._options.pool_wait:
                self._fail(key, PoolUnavailable(f"no compile actor was available for {waited:.0f} s"))
            elif pending.asked is None:
                self._ask(key, pending)
            elif waited > self._seconds + _GRACE_SECONDS:
                if self._actor is pending.asked:
                    _log.error("the compile actor does not answer")
                    self._end_actor()
                self._fail(key, CompileTimeout(f"this constraint was not compiled within {waited:.0f} s"))

    def _fail(self, key: CacheKey, error: GuidedError) -> None:
        with self._lock:
            future = self._pending.pop(key).future
            self._drop(self._cache.fail(key, error))
        future.set_exception(error)

    def _end_actor(self) -> None:
        """Kill the compile actor, which may be unable to end by itself."""
        if self._actor is not None:
            process = None
            if self._location.done() and self._location.exception() is None:
                location = self._location.result()
                process = ProcessHandle(location.pid if location.is_beside(self._node_id) else None)
            kill_actor(self._actor, process)
            self._actor = None

    def _drop(self, keys: Collection[str]) -> None:
        """Report evicted grammars. Within the lock, so that none is reported after it was compiled again."""
        if keys:
            self._when_unused(keys)

    def _start_actor(self) -> RemoteActor:
        driver, ray = self._cluster.driver()
        self._node_id, options = ray.node_id, self._options
        # The compile actor runs on one of the nodes of the mask actors. It takes nothing of their resource.
        placement = replace(NodePlacement.parse(options.placement), amount=0.0)
        created = driver.create(
            "actors.compile.compiler:CompileActor",
            ProcessLocation.here(ray.node_id),
            self._vocabulary,
            options.compile_limits,
            scheduling=Scheduling(placement, self._cluster.reserved(options.compile_cpus), index=-1),
        )
        try:
            return created.result(_CREATE_SECONDS)
        except TimeoutError:
            raise PoolUnavailable(f"Ray did not start the compile actor within {_CREATE_SECONDS:g} s") from None
        except (ActorDied, ActorFailed) as error:
            raise PoolUnavailable(f"Ray did not start the compile actor: {bounded(error)}") from error


def _failed(error: GuidedError) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_exception(error)
    return future
