"""RayPool: mask workers in Ray actors, at in-process speed. A supervisor keeps each actor alive.

Ray places, starts and ends the actors. A step is one message per actor over a socket, and masks are in shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

import psutil

from actors import processes
from actors.cluster import Cluster, Session
from actors.compiler import Compiler
from actors.connection import WorkerConnection
from actors.dispatcher import Dispatcher
from actors.mask_actor import ActorLocation
from actors.processes import CALL_SECONDS, RETRY_SECONDS, START_SECONDS, STOP_SECONDS, TICK_SECONDS, kill, memory_limit
from actors.protocol import Channel
from actors.watch import Verdict, Watch
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    GrammarLoadTimeout,
    GuidedError,
    MaskTimeout,
    PoolUnavailable,
    WorkerDied,
    bounded,
)
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import EndCause, Grammar, PoolStatus, WorkerState, WorkerStatus
from guided.processors.pinned_masks import Pin
from guided.vocabulary import Vocabulary

_SLOW_LOAD = (GrammarLoadTimeout, "was killed: it took too long to load a grammar")
_STILL = (WorkerDied, "was killed: it did not run, or begin with what it was sent")
_ENDS: Mapping[EndCause, tuple[type[GuidedError], str]] = {
    "died": (WorkerDied, "died"),
    "fill": (MaskTimeout, "was killed: a mask took longer than {seconds:g} s"),
    "memory": (BackendError, "was killed: it took more than {mib} MiB of memory"),
    **dict.fromkeys(("load", "import"), _SLOW_LOAD),
    **dict.fromkeys(("frozen", "transfer"), _STILL),
}
_RETRY_START_SECONDS = 30.0
"""Pause before another attempt to start a pool that could not be started."""
_LOOK_SECONDS = 0.05
"""Interval in which a wait looks whether the actors are up."""
_log = logging.getLogger(__name__)


class RayPool(Dispatcher):
    """A `MaskPool` of Ray actors. They start in the background with the first constraint, or with `start`.

    Args:
        vocabulary: the vocabulary of the masks.
        options: None is `RayPoolOptions()`.
        pin: called with each actor's mask column before it is up, on other threads: see `pin_masks`.
        changes: fields of `RayPoolOptions` that replace those of `options`.
    """

    def __init__(
        self, vocabulary: Vocabulary, options: RayPoolOptions | None = None, pin: Pin | None = None, **changes: Any
    ) -> None:
        self.options = options = replace(options or RayPoolOptions(), **changes)
        super().__init__(options.pool_wait, options.max_replays, options.forced_tokens)
        self.vocabulary = vocabulary
        self.pin = pin
        self._supervisors: list[Supervisor] = []
        self._lock = threading.Lock()
        """Protects the start, and what is known of it."""
        self._is_starting = False
        """Whether no actor has been up yet."""
        self._undo = contextlib.ExitStack()
        self._undo.callback(self.close)

    def start(self) -> None:
        """Start Ray and the actors in the background, unless that has begun. Until then, sequences wait for them."""
        with self._lock:
            if self._supervisors or self.unavailable is not None:
                return
            _log.info("starting the Ray pool: it takes some 5 s and 1.2 GB of memory; pool='inline' takes neither")
            self._is_starting = True
            self.pool_wait = math.inf
            self._compiler = Compiler(self.vocabulary, self.options)
            self._undo.callback(self._compiler.close)
            self.cluster = Cluster.join(self.options.address)
            self._undo.callback(self.cluster.leave)
            self._undo.callback(self._stop_actors)
            for index in range(self.options.actors):
                self._supervisors.append(Supervisor(index, self))

    def started(self) -> Self:
        """Wait for the first actor that is up, and some seconds for the others: Ray may have to wait for CPUs.

        Raises:
            PoolUnavailable: Ray can't be reached or started, or no actor starts; says why.
        """
        self.start()
        while self._is_starting:
            if self.unavailable is not None:
                raise self.unavailable
            time.sleep(_LOOK_SECONDS)
        deadline = time.monotonic() + CALL_SECONDS
        while self._starting() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for index in self._starting():
            _log.warning("mask actor %d is not up yet: the pool begins without it", index)
        return self

    def _starting(self) -> list[int]:
        """Return the actors of which the first start has not ended."""
        return [supervisor.index for supervisor in self._supervisors if supervisor.state == "starting"]

    def note_state(self, error: PoolUnavailable | None) -> None:
        """Note that an actor is up, or why it did not start. From the supervisors' threads."""
        with self._lock:
            if error is None:
                self._is_starting = False
                self.pool_wait = self.options.pool_wait
                self.unavailable = None
            elif self._is_starting and all(supervisor.state == "down" for supervisor in self._supervisors):
                self.unavailable = error

    def _stop_actors(self) -> None:
        """End the actors. One that still runs after some seconds ends with this process."""
        for supervisor in self._supervisors:
            supervisor.stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for supervisor in self._supervisors:
            supervisor.thread.join(max(0.0, deadline - time.monotonic()))

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        self.start()
        error = self.refusal(constraint)
        if error is None:
            return self._compiler.compile(constraint, backends)
        refused: Future[Grammar] = Future()
        refused.set_exception(error)
        return refused

    def status(self) -> PoolStatus:
        if not self._supervisors:
            return PoolStatus("ray")
        return PoolStatus(
            name="ray",
            workers=[supervisor.status() for supervisor in self._supervisors],
            backends=self._compiler.backends(),
            trouble=self.cluster.trouble,
            replays=self.replays,
            quarantined=self.quarantine.keys(),
            quarantines=self.quarantine.total,
            **self._compiler.counts(),
        )

    def shutdown(self) -> None:
        """End the actors and release all processes, sockets, memory and files. Idempotent."""
        self._undo.close()


class Supervisor:
    """Keeps actor `index` of a pool alive: starts it, watches it, announces its end, starts the next one.

    Each has a thread. `_live` is one incarnation of the actor.
    """

    def __init__(self, index: int, pool: RayPool) -> None:
        self.index = index
        self._pool = pool
        self._options = pool.options
        self._memory = memory_limit(pool.options.actor_memory_bytes)
        self.state: WorkerState = "starting"
        self._incarnation = 0
        self._up: tuple[WorkerConnection, ActorLocation] | None = None
        """Set while the actor is up."""
        self._watch: Watch | None = None
        self.stopping = threading.Event()
        """Set to end the actor for good. `thread` ends then."""
        self._causes: Counter[str] = Counter()
        self._last_end: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"supervisor-{index}", daemon=True)
        self.thread.start()

    def status(self) -> WorkerStatus:
        """Return a snapshot. From any thread."""
        connection, location = self._up or (None, None)
        return WorkerStatus(
            index=self.index,
            incarnation=self._incarnation,
            state=self.state,
            pid=location and location.pid,
            node=location and location.host,
            node_id=location and location.node_id,
            open_sequences=0 if connection is None else len(connection.sequences),
            restarts=max(0, self._incarnation - 1),
            ends=dict(self._causes),
            last_end=self._last_end,
            silent=self._watch.silent if self._watch is not None and location else 0.0,
        )

    def _run(self) -> None:
        while not self.stopping.is_set():
            try:
                self._live()
            except Exception as raised:
                reason = raised if isinstance(raised, GuidedError) else bounded(raised)
                error = PoolUnavailable(f"mask actor {self.index} did not start: {reason}")
                if not self.stopping.is_set():
                    self.state = "down"
                    self._record_end("not_started", error.message)
                    self._pool.note_state(error)
                if self._pool.unavailable is None:
                    pause = RETRY_SECONDS
                else:
                    pause = _RETRY_START_SECONDS
                self.stopping.wait(pause)

    def _live(self) -> None:
        """Run one incarnation from start to end. Raises if it does not start."""
        began = time.monotonic()
        process: psutil.Process | None = None
        """The actor's process, or None if it is on another node."""
        if not self._incarnation:
            self._pool.cluster.check_room(self._options, self.stopping)
        session = self._pool.cluster.session(self.stopping)
        where = (*self._pool.cluster.reserved(self._options), self.index)
        arguments = (self._pool.vocabulary, self._memory, self._options.forced_tokens, self._options.preload)
        try:
            location: ActorLocation = session.ask("bring the actor up", "create", *where, *arguments)
            self._incarnation += 1
            version = processes.package_version()
            if location.version != version:
                raise PoolUnavailable(
                    f"{location.host} has version {location.version} of guided, and this process {version}: install "
                    "the same one on all nodes"
                )
            connection, is_local = self._connect(session, location.host, location.pid)
            if is_local:
                process = psutil.Process(location.pid)
            else:
                process = None
            if self._pool.pin is not None:
                self._pool.pin(connection.table.mask)
            if self.stopping.is_set():
                return
            _log.info("mask actor %d (pid %d) is up after %.1f s", self.index, location.pid, time.monotonic() - began)
            self._up = (connection, location)
            self.state = "up"
            self._pool.announce(partial(self._pool.add, connection))
            self._pool.note_state(None)
            watch = self._watch = Watch(connection, process, self._options.mask_limit, self._memory)
            cause: EndCause = "died"
            culprit = None
            try:
                cause, culprit = self._watched(session, connection, watch)
                if not self.stopping.is_set():
                    works = [culprit] if culprit is not None else connection.work()
                    described = "".join(connection.described(work, watch.silent) for work in works)
                    self._record_end(cause, self._error_of(cause, location.pid).message + described)
                if cause != "died" and process is not None:
                    kill(process)
            finally:  # whatever happens: its sequences would wait for ever
                self._up = None
                self.state = "restarting"
                error = self._error_of(cause, location.pid)
                self._pool.announce(partial(self._pool.end, connection, error, cause, culprit))
        finally:
            session.close()  # first, because Ray would report a kill as an unexpected death
            if process is not None:
                kill(process, after=1.0)

    def _connect(self, session: Session, host: str, pid: int) -> tuple[WorkerConnection, bool]:
        """Connect to the actor: directly if it can reach this process, otherwise through Ray.

        Returns whether it is direct too: then the actor is on this node, and not in another container.
        """
        shape = self._options.slots, words(self._pool.vocabulary.padded_vocab_size)
        channel = Channel()
        try:
            is_local: bool = session.ask("connect the actor", "connect", channel.name, *shape)
            table = channel.accept(START_SECONDS, *shape)
            if table is None:
                raise PoolUnavailable(f"the actor on {host} cannot connect to this process")
        except BaseException:
            channel.close()
            raise
        name = f"mask worker {self.index}, pid {pid}"
        size = self._options.max_cache_bytes
        return WorkerConnection(name, pid, channel, table, size, is_remote=not is_local), is_local

    def _record_end(self, cause: EndCause, message: str) -> None:
        self._causes[cause] += 1
        self._last_end = bounded(message)
        if cause == "died" and not self._options.max_replays:
            message += "; its requests end, because max_replays is 0: with 1 they would go on elsewhere"
        _log.warning("%s", message)

    def _error_of(self, cause: EndCause, pid: int) -> GuidedError:
        """Return the error of the sequences that are lost with this incarnation."""
        kind, how = _ENDS[cause]
        how = how.format(mib=self._memory >> 20, seconds=self._options.mask_limit)
        return kind(f"mask worker {self.index} (pid {pid}, incarnation {self._incarnation}) {how}")

    def _watched(self, session: Session, connection: WorkerConnection, watch: Watch) -> Verdict:
        """Wait until the incarnation ends or has to be ended."""
        poller = select.poll()
        for end in (connection.channel.fd, session):
            poller.register(end, 0)  # reports POLLHUP: the actor's process, or the driver, has ended
        while not poller.poll(TICK_SECONDS * 1000) and not self.stopping.is_set():
            verdict = watch.look()
            if verdict is not None:
                return verdict
        return "died", None
