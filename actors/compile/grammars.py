"""Grammars of a pool: compiled once by the compile actor, installed on the mask actors, dropped when unused.

The work is done on one thread, so that neither the engine's thread nor a callback of Ray ever waits for Ray.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from msgspec.msgpack import encode

from actors.cluster import Cluster
from actors.compile.loading import ActorHandle, Loading, StoredGrammar, died_loading
from actors.compile.process import CompileResult
from actors.driver.client import ActorDied, ActorFailed, RemoteActor, RemoteObject
from actors.driver.scheduling import Scheduling
from actors.processes import ProcessHandle, ProcessLocation, kill_actor, memory_limit
from guided.backends import BACKENDS
from guided.compilation import grammar_key, is_about_backend
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
from guided.pools.grammar_cache import CacheKey, GrammarCache, cache_key
from guided.pools.options import NodePlacement, RayPoolOptions
from guided.pools.protocol import BackendStatus, Grammar
from guided.pools.suspensions import Suspensions
from guided.vocabulary import Vocabulary

_GRACE_SECONDS = 1.0
"""Once one worker has loaded a grammar, its requests wait for the other workers for at most this time."""
_MAX_COMPILE_ACTORS = 10
"""Maximum number of compile actors that may die with one constraint. The constraint is not the cause: native code runs
in the children of the compile actor."""
_MAX_RETRY_SECONDS = 60.0
"""Time after which a constraint is not given to another compile actor."""
_SHARE_IN_USE = 0.05
"""Share of an actor's memory limit for grammars in use. Further grammars wait until others are released."""
_TICK_SECONDS = 0.5
_CREATE_SECONDS = 10.0
_START_SECONDS = 60.0
"""Time limit for the compile actor's first answer: it may still be starting."""
_HEARTBEAT_SECONDS = 15.0
"""Time limit for its later answers."""
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(eq=False, slots=True)
class _Pending:
    """A constraint that is being compiled, or a grammar that waits for the workers that load it."""

    constraint: Constraint
    backends: list[str]
    future: Future[Grammar] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when it was requested. Reset when it is compiled, and when the workers are told to load it."""
    actors_lost: int = 0
    """Compile actors that died while they had it."""
    waits_for_ray: bool = False
    """It is given to a compile actor once Ray can start one."""
    grammar: Grammar | None = None
    """Set once it is compiled, like `stored`."""
    stored: StoredGrammar | None = None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar that waits for memory in the actors."""

    pending: _Pending
    grammar: Grammar
    stored: StoredGrammar
    nbytes: int


class Grammars:
    """Compiles, caches and installs grammars. Its methods may be called from any thread."""

    def __init__(self, cluster: Cluster, vocabulary: Vocabulary, options: RayPoolOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._compiler = _CompilerHandle(cluster, vocabulary, options)
        self._suspensions = Suspensions(BACKENDS)
        self._lock = threading.Lock()
        in_use = int(_SHARE_IN_USE * memory_limit(options.actor_memory_bytes))
        self._cache = GrammarCache(options.max_cache_bytes, in_use)
        self._freed = 0.0
        """`time.monotonic()` when a grammar was last released."""
        self._pending: dict[CacheKey, _Pending] = {}
        self._closed = False
        # The following belong to the thread.
        self._compiled_grammars: list[_Compiled] = []
        """In the order in which they were compiled."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loading = Loading(self._when_done, self._check_installs, self._compile_lost)
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()
        cluster.subscribe(self._when_ray_is_lost)

    @property
    def compiling(self) -> int:
        """Number of constraints that are being compiled or installed, or wait for it."""
        return len(self._pending)

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """See `MaskPool.compile`. Returns at once."""
        try:
            admitted = self._suspensions.admitted(backends)
        except BackendSuspended as error:
            return _failed(error)
        future = self._compiled_by(constraint, admitted)
        return future if len(admitted) == len(backends) else self._unless_suspended(future, backends)

    def _unless_suspended(self, future: Future[Grammar], backends: Sequence[str]) -> Future[Grammar]:
        """Return `future`, the result of the backends that are not suspended, with another error: if none of them can
        enforce the constraint, the error is the suspension of the others."""
        outcome: Future[Grammar] = Future()
        outcome.set_running_or_notify_cancel()

        def pass_on(done: Future[Grammar]) -> None:
            error = done.exception()
            if isinstance(error, GuidedError) and is_about_backend(error):
                error = self._suspensions.error(backends) or error
            if error is None:
                outcome.set_result(done.result())
            else:
                outcome.set_exception(error)

        future.add_done_callback(pass_on)
        return outcome

    def _compiled_by(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        key = cache_key(constraint, backends)
        with self._lock:
            if self._closed:
                return _failed(PoolUnavailable("the pool is shut down"))
            future, new = self._cache.acquire(key)
            if new and len(self._pending) >= self._options.max_compiling:
                full = CompileQueueFull(f"{len(self._pending)} constraints are being compiled or waiting: try again")
                self._cache.fail(key, full)
                return _failed(full)
            if not new:
                if not self._has_lost_workers(future):
                    return future
                if key in self._pending:
                    return self._pending[key].future
            pending = self._pending[key] = _Pending(constraint, list(backends))
            if new:
                pending.future, task = future, partial(self._compile, key, pending)
            else:
                task = partial(self._reinstall, key, pending, future.result())
            pending.future.set_running_or_notify_cancel()  # shared by several requests: cannot be cancelled
        self._tasks.put(task)
        return pending.future

    def release(self, grammar: Grammar) -> None:
        """See `MaskPool.release`. Returns at once."""
        with self._lock:
            evicted = self._cache.release(grammar)
            self._freed = time.monotonic()
        if evicted:
            self._tasks.put(partial(self._loading.remove, evicted))
        if self._compiled_grammars:
            self._tasks.put(self._admit)

    def rejection(self, key: str) -> GuidedError | None:
        """Return why the grammar with this key is rejected; None if it is not."""
        return self._loading.rejection(key)

    def backends(self) -> list[BackendStatus]:
        """Return which backends are suspended."""
        return self._suspensions.status()

    def add_actor(self, handle: ActorHandle, timeout: float) -> None:
        """Have a new actor load all grammars. Returns when it has loaded those in use, and the suspects.

        Raises:
            PoolUnavailable: it did not load them in time, or died.
        """
        deadline = time.monotonic() + timeout
        self._wait_for_loads(handle, self._ask(partial(self._add_actor, handle), timeout), deadline)
        while (suspect := self._ask(partial(self._loading.load_next_suspect, handle), timeout)) is not None:
            self._wait_for_loads(handle, [suspect], deadline)

    def start_serving(self, handle: ActorHandle) -> None:
        """Sequences are placed on this actor from now on: finish the compilations that waited for one."""
        handle.serving = True
        self._tasks.put(self._check_installs)

    def remove_actor(self, handle: ActorHandle) -> None:
        """Remove an actor that has ended."""
        self._tasks.put(partial(self._remove_actor, handle))

    def compile_pids(self) -> list[int]:
        """Ask the compile actor for the pids of its processes; takes milliseconds."""
        return self._compiler.pids()

    def close(self) -> None:
        """Stop; pending compilations fail with `PoolUnavailable`."""
        self._cluster.unsubscribe(self._when_ray_is_lost)
        with self._lock:
            self._closed = True
        self._tasks.put(None)
        self._thread.join()
        for key in list(self._pending):
            self._fail(key, PoolUnavailable("the pool was shut down"))
        self._compiler.kill()

    def _has_lost_workers(self, future: Future[Grammar]) -> bool:
        """Return whether a grammar is compiled, but all workers that had loaded it are gone."""
        if not future.done() or future.exception() is not None:
            return False
        key = future.result().key
        return not any(handle.serving and key in handle.installed for handle in self._loading.actors)

    def _ask(self, question: Callable[[], _Answer], timeout: float) -> _Answer:
        """Call a function on the thread and return its result."""
        answer: Future[_Answer] = Future()
        self._tasks.put(lambda: answer.set_result(question()))
        return answer.result(timeout)

    def _wait_for_loads(self, handle: ActorHandle, loads: Sequence[Future[None]], deadline: float) -> None:
        missing = set(loads)
        while missing:
            done, missing = wait(missing, _TICK_SECONDS, FIRST_COMPLETED)
            if any(map(died_loading, done)):
                raise PoolUnavailable(f"it died while it loaded grammars ({len(missing) + 1} were left)")
            if missing and (handle.is_overdue() or time.monotonic() > deadline):
                raise PoolUnavailable(f"{len(missing)} of {len(loads)} grammars were not loaded in time")

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_SECONDS if self._pending else None)
            except queue.Empty:
                self._compiler.check()
                self._compile_waiting()
                self._admit()
                self._check_installs()
                continue
            if task is None:
                return
            try:
                task()
            except Exception:
                _log.exception("a grammar task failed")

    def _when_done(self, future: Future[Any], task: Callable[[Future[Any]], None]) -> None:
        """Run `task` on the thread once the future is done."""
        future.add_done_callback(lambda done: self._tasks.put(partial(task, done)))

    def _compile(self, key: CacheKey, pending: _Pending) -> None:
        actor = self._compiler.actor
        result, dumped = actor.call_and_keep("compile", encode(pending.constraint), pending.backends)
        self._when_done(result, partial(self._compiled, key, pending, actor, dumped))

    def _compiled(
        self, key: CacheKey, pending: _Pending, actor: RemoteActor, dumped: RemoteObject, done: Future[CompileResult]
    ) -> None:
        constraint = pending.constraint
        try:
            result = done.result()
        except ActorDied:
            self._compile_again(key, pending, actor)
            return
        except Exception as error:
            self._fail(key, PoolUnavailable(f"the compile actor failed: {bounded(error)}"))
            return
        for backend in result.crashed:
            self._suspensions.crashed(backend, constraint.key)
        for backend in result.timed_out:
            self._suspensions.timed_out(backend)
        if result.error is not None:
            self._fail(key, from_wire(result.error))
            return
        name = grammar_key(result.backend, constraint)
        grammar = Grammar(
            name,
            result.backend,
            constraint,
            key,
            result.seconds,
            checked=tuple(result.checked),
            mask_seconds=result.mask_seconds,
        )
        stored = StoredGrammar(name, result.backend, encode(constraint), dumped)
        pending.since = time.monotonic()
        self._compiled_grammars.append(_Compiled(pending, grammar, stored, result.nbytes))
        self._admit()

    def _admit(self) -> None:
        """Have compiled grammars loaded, in order, as far as memory allows."""
        while self._compiled_grammars:
            first = self._compiled_grammars[0]
            with self._lock:
                evicted = self._cache.admit(first.grammar, first.nbytes)
            if evicted is None:
                break
            del self._compiled_grammars[0]
            if evicted:
                self._loading.remove(evicted)
            self._install(first.pending, first.grammar, self._loading.add(first.stored))
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Fail compiled grammars that wait for memory, if no grammar was released for too long."""
        limit = self._options.compile_limits.wait_seconds
        for each in list(self._compiled_grammars):
            if time.monotonic() - max(each.pending.since, self._freed) > limit:
                self._compiled_grammars.remove(each)
                text = f"this constraint waited {limit:g} s for memory that others use; try again later"
                self._fail(each.grammar.cache_key, CompileQueueFull(text))

    def _compile_again(self, key: CacheKey, pending: _Pending, actor: RemoteActor) -> None:
        """Give a constraint to another compile actor: the one that had it died."""
        seconds = time.monotonic() - pending.since
        try:
            self._compiler.replace(actor)
        except PoolUnavailable as error:
            pending.waits_for_ray = True
            if seconds > self._options.pool_wait:
                text = f"the constraint could not be compiled for {self._options.pool_wait:g} s: {error}"
                self._fail(key, PoolUnavailable(text))
            return
        pending.actors_lost += 1
        if pending.actors_lost == _MAX_COMPILE_ACTORS or seconds > _MAX_RETRY_SECONDS:
            text = f"the compile actor died {pending.actors_lost} times within {seconds:.0f} s with this constraint"
            self._fail(key, PoolUnavailable(text))
        else:
            self._compile(key, pending)

    def _compile_waiting(self) -> None:
        """Try again to compile what waits for Ray."""
        for key, pending in list(self._pending.items()):
            if pending.waits_for_ray:
                pending.waits_for_ray = False
                self._compile(key, pending)

    def _when_ray_is_lost(self) -> None:
        self._tasks.put(self._loading.forget)
        self._tasks.put(self._compile_lost)

    def _compile_lost(self, key: str | None = None) -> None:
        """Compile lost grammars again if they are in use: the one with `key`, or all (None: Ray was lost). Others are
        compiled again when they are requested."""
        if key is None:
            for each in self._compiled_grammars:
                each.pending.waits_for_ray = True
            self._compiled_grammars = []
        with self._lock:
            for grammar in self._cache.in_use():
                if grammar.cache_key not in self._pending and key in (None, grammar.key):
                    pending = _Pending(grammar.constraint, [grammar.backend], grammar=grammar)
                    pending.future.set_running_or_notify_cancel()
                    self._pending[grammar.cache_key] = pending
            for pending in self._pending.values():
                if pending.grammar is not None and key in (None, pending.grammar.key):
                    pending.grammar = pending.stored = None
                    pending.since = time.monotonic()
                    pending.waits_for_ray = True

    def _reinstall(self, key: CacheKey, pending: _Pending, grammar: Grammar) -> None:
        """Have a compiled grammar loaded again; all workers that had loaded it are gone."""
        stored = self._loading.stored.get(grammar.key)
        if stored is None:
            self._compile(key, pending)
        else:
            self._loading.retry(stored)
            self._install(pending, grammar, stored)

    def _install(self, pending: _Pending, grammar: Grammar, stored: StoredGrammar) -> None:
        pending.grammar, pending.stored, pending.since = grammar, stored, time.monotonic()
        self._check_installs()

    def _check_installs(self) -> None:
        for pending in list(self._pending.values()):
            if pending.grammar is not None and pending.stored is not None:
                self._check_install(pending, pending.grammar, pending.stored)

    def _check_install(self, pending: _Pending, grammar: Grammar, stored: StoredGrammar) -> None:
        """Finish the future of a grammar if workers have loaded it, or none will."""
        seconds = time.monotonic() - pending.since
        loads = {handle: load for handle, load in stored.loads.items() if not died_loading(load)}
        if any(handle.serving and grammar.key in handle.installed for handle in loads) and (
            seconds > _GRACE_SECONDS or all(load.done() for load in loads.values())
        ):
            self._pending.pop(grammar.cache_key).future.set_result(grammar)
        elif (rejection := self.rejection(grammar.key)) is not None:
            self._fail(grammar.cache_key, rejection)
        elif loads and all(load.done() and load.exception() is not None for load in loads.values()):
            why = bounded(next(iter(loads.values())).exception())
            self._fail(grammar.cache_key, BackendError(f"no worker could load the grammar: {why}"))
        elif seconds > self._options.pool_wait:
            text = f"no mask worker was available for {self._options.pool_wait:g} s"
            self._fail(grammar.cache_key, PoolUnavailable(text))

    def _fail(self, key: CacheKey, error: GuidedError) -> None:
        with self._lock:
            future = self._pending.pop(key).future
            evicted = self._cache.fail(key, error)
        if evicted:
            self._loading.remove(evicted)
        future.set_exception(error)

    def _add_actor(self, handle: ActorHandle) -> list[Future[None]]:
        with self._lock:
            needed = {grammar.key for grammar in self._cache.in_use()}
        needed.update(pending.stored.key for pending in list(self._pending.values()) if pending.stored is not None)
        return self._loading.add_actor(handle, needed)

    def _remove_actor(self, handle: ActorHandle) -> None:
        self._loading.remove_actor(handle)
        self._check_installs()


class _CompilerHandle:
    """The compile actor, from the pool's side: replaced when it dies, killed when it does not answer."""

    def __init__(self, cluster: Cluster, vocabulary: Vocabulary, options: RayPoolOptions) -> None:
        self._cluster = cluster
        self._vocabulary = vocabulary
        self._options = options
        self._heartbeat: tuple[Future[ProcessLocation], float] | None = None
        """The unanswered call of `location`, and when it was made."""
        self._process: ProcessHandle | None = None
        """Known from its first answer on."""
        self.actor = self._start()

    def replace(self, actor: RemoteActor) -> None:
        """Start another compile actor, if `actor`, which died, is still the current one.

        Raises:
            PoolUnavailable: Ray cannot start one now.
        """
        if self.actor is actor:
            started = self._start()
            _log.error("the compile actor died: it was started again")
            actor.end()
            self.actor = started
            self._heartbeat = self._process = None

    def check(self) -> None:
        """Kill the actor if it does not answer. Its calls fail then, and are made again with the next actor."""
        now = time.monotonic()
        if self._heartbeat is None:
            self._heartbeat = self.actor.call("location"), now
            return
        answer, since = self._heartbeat
        if answer.done():
            if self._process is None and answer.exception() is None:
                location = answer.result()
                self._process = ProcessHandle(location.pid if location.is_beside(self._node_id) else None)
            self._heartbeat = None
        elif now - since > (_START_SECONDS if self._process is None else _HEARTBEAT_SECONDS):
            _log.error("the compile actor does not answer")
            self.kill()

    def pids(self) -> list[int]:
        """Return the pids of the compile processes."""
        pids: list[int] = self.actor.call("pids").result(_START_SECONDS)
        return pids

    def kill(self) -> None:
        """Kill the actor, which may be unable to end by itself."""
        kill_actor(self.actor, self._process)
        self._heartbeat = self._process = None

    def _start(self) -> RemoteActor:
        driver, ray = self._cluster.driver()
        self._node_id = ray.node_id
        owner = ProcessLocation.here(ray.node_id)
        actor_class = "actors.compile.compiler:CompileActor"
        options = self._options
        # The compile actor runs on one of the nodes of the mask actors. It takes nothing of their resource.
        placement = replace(NodePlacement.parse(options.placement), amount=0.0)
        created = driver.create(
            actor_class,
            owner,
            driver.stored(self._vocabulary),
            options.compile_limits,
            scheduling=Scheduling(placement, self._cluster.reserved(options.compile_cpus), random.randrange(1 << 16)),
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
