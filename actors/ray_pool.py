"""RayPool: mask workers in Ray actors, at in-process speed. A supervisor keeps each
actor alive.

Ray places, starts and ends the actors. A step is one message per actor over a socket,
and masks are in shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Self

import psutil

from actors.cluster import Cluster, Session
from actors.compiler import Compiler
from actors.connection import WorkerConnection
from actors.dispatcher import Dispatcher
from actors.mask_actor import ActorLocation
from actors.processes import (
    CALL_SECONDS,
    RETRY_SECONDS,
    STOP_SECONDS,
    TICK_SECONDS,
    kill,
    memory_limit,
)
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
from guided.pools.protocol import Grammar
from guided.pools.status import EndCause, PoolStatus, WorkerStatus
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
    """A `MaskPool` of Ray actors. They start in the background with the first
    constraint, or with `start`.

    Args:
        vocabulary: the vocabulary of the masks.
        options: None is `RayPoolOptions()`.
        pin: called with each actor's mask column before it is up, on other threads: see
            `pin_masks`.
        changes: fields of `RayPoolOptions` that replace those of `options`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: RayPoolOptions | None = None,
        pin: Pin | None = None,
        **changes: Any,
    ) -> None:
        self.options = options = replace(options or RayPoolOptions(), **changes)
        super().__init__(options.pool_wait, options.max_replays, options.forced_tokens)
        self.vocabulary = vocabulary
        self.pin = pin
        self._supervisors: list[Supervisor] = []
        self.stopping = threading.Event()
        """Set to end the actors for good. The supervisors' threads end then."""
        self._lock = threading.Lock()
        """Protects the start, and what is known of it."""
        self._is_starting = False
        """Whether no actor has been up yet."""
        self._undo = contextlib.ExitStack()
        self._undo.callback(self.close)

    def start(self) -> None:
        """Start Ray and the actors in the background, unless that has begun. Until
        then, sequences wait for them."""
        with self._lock:
            if self._supervisors or self.unavailable is not None:
                return
            _log.info(
                "starting the Ray pool: it takes some 5 s and 1.2 GB of memory; pool='inline' takes neither"
            )
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
        """Wait for the first actor that is up, and some seconds for the others: Ray may
        have to wait for CPUs.

        Raises:
            PoolUnavailable: Ray can't be reached or started, or no actor starts; says
                why.
        """
        self.start()
        while self._is_starting:
            if self.unavailable is not None:
                raise self.unavailable
            time.sleep(_LOOK_SECONDS)
        deadline = time.monotonic() + CALL_SECONDS
        while (
            any(actor.state == "starting" for actor in self.status().workers)
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_SECONDS)
        for worker in self.status().workers:
            if worker.state == "starting":
                text = "mask actor %d is not up yet: the pool begins without it"
                _log.warning(text, worker.index)
        return self

    def note_state(self, error: PoolUnavailable | None) -> None:
        """Note that an actor is up, or why it did not start. From the supervisors'
        threads."""
        with self._lock:
            if error is None:
                self._is_starting = False
                self.pool_wait = self.options.pool_wait
                self.unavailable = None
            elif self._is_starting and all(
                actor.state == "down" for actor in self.status().workers
            ):
                self.unavailable = error

    def _stop_actors(self) -> None:
        """End the actors. One that still runs after some seconds ends with this
        process."""
        self.stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for supervisor in self._supervisors:
            supervisor.thread.join(max(0.0, deadline - time.monotonic()))

    def compile(
        self, constraint: Constraint, backends: Sequence[str]
    ) -> Future[Grammar]:
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
            workers=[supervisor.status for supervisor in self._supervisors],
            backends=self._compiler.backends(),
            trouble=self.cluster.trouble,
            replays=self.replays,
            quarantined=self.quarantine.keys(),
            quarantines=self.quarantine.total,
            **self._compiler.counts(),
        )

    def shutdown(self) -> None:
        """End the actors and release all processes, sockets, memory and files.
        Idempotent."""
        self._undo.close()


class Supervisor:
    """Keeps actor `index` of a pool alive: starts it, watches it, announces its end,
    starts the next one.

    Each has a thread. `_live` is one incarnation of the actor.
    """

    def __init__(self, index: int, pool: RayPool) -> None:
        self._pool = pool
        self._options = pool.options
        self._memory = memory_limit(pool.options.actor_memory_bytes)
        self._status = WorkerStatus(
            index, 0, "starting", pid=None, node=None, open_sequences=0, restarts=0
        )
        self._watch: Watch | None = None
        """Set while the actor is up."""
        self.thread = threading.Thread(
            target=self._run, name=f"supervisor-{index}", daemon=True
        )
        self.thread.start()

    @property
    def status(self) -> WorkerStatus:
        """A snapshot. For any thread."""
        watch = self._watch
        if watch is None:
            return self._status
        return replace(
            self._status,
            open_sequences=len(watch.connection.sequences),
            silent=watch.silent,
        )

    def _note(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)

    def _run(self) -> None:
        stopping = self._pool.stopping
        while not stopping.is_set():
            try:
                self._live(stopping)
            except Exception as raised:
                reason = raised if isinstance(raised, GuidedError) else bounded(raised)
                error = PoolUnavailable(
                    f"mask actor {self._status.index} did not start: {reason}"
                )
                if not stopping.is_set():
                    self._note(state="down")
                    self._record_end("not_started", error.message)
                    self._pool.note_state(error)
                if self._pool.unavailable is None:
                    pause = RETRY_SECONDS
                else:
                    pause = _RETRY_START_SECONDS
                stopping.wait(pause)

    def _live(self, stopping: threading.Event) -> None:
        """Run one incarnation from start to end. Raises if it does not start."""
        began = time.monotonic()
        process: psutil.Process | None = None
        """The actor's process, or None if it is on another node."""
        session = self._pool.cluster.session(stopping)
        try:
            connection, location = self._connect(session)
            if location.is_direct:
                process = psutil.Process(location.pid)
            if self._pool.pin is not None:
                self._pool.pin(connection.table.mask)
            _log.info(
                "mask actor %d (pid %d) is up after %.1f s",
                self._status.index,
                location.pid,
                time.monotonic() - began,
            )
            watch = self._watch = Watch(
                connection, process, self._options.mask_limit, self._memory
            )
            restarts = self._status.incarnation
            place = {
                "pid": location.pid,
                "node": location.host,
                "node_id": location.node_id,
            }
            self._note(state="up", incarnation=restarts + 1, restarts=restarts, **place)
            self._pool.announce(partial(self._pool.add, connection))
            self._pool.note_state(None)
            verdict: Verdict = ("died", [])
            try:
                verdict = self._watched(session, watch)
                cause, works = verdict
                if not stopping.is_set():
                    described = [
                        connection.described(work, watch.silent)
                        for work in works or connection.work()
                    ]
                    self._record_end(
                        cause, self._error_of(cause).message + "".join(described)
                    )
                if cause != "died" and process is not None:
                    kill(process)
            finally:  # whatever happens: its sequences would wait for ever
                self._pool.announce(
                    partial(
                        self._pool.end, connection, self._error_of(verdict[0]), *verdict
                    )
                )
                self._watch = None
                self._note(state="restarting", pid=None, node=None, node_id=None)
        finally:
            # first, because Ray would report a kill as an unexpected death
            session.close()
            if process is not None:
                kill(process, after=1.0)

    def _connect(self, session: Session) -> tuple[WorkerConnection, ActorLocation]:
        """Have an actor started, and connect to it: directly if it can reach this
        process, otherwise through Ray."""
        pool = self._pool
        options = pool.options
        index = self._status.index
        placement, cpus, number = pool.cluster.reserved(options)
        if self._status.incarnation:
            number = 1  # the others are up, and nodes may have been lost since then
        shape = options.slots, words(pool.vocabulary.padded_vocab_size)
        arguments = (
            pool.vocabulary,
            self._memory,
            options.forced_tokens,
            options.preload,
        )
        channel = Channel()
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            where = (placement, cpus, number, index, (channel.name, *shape))
            location: ActorLocation = session.ask(
                "bring the actor up", "create", *where, *arguments
            )
            ours = version("guided")
            if location.version != ours:
                raise PoolUnavailable(
                    f"{location.host} has version {location.version} of guided, and this process {ours}: install "
                    "the same one on all nodes"
                )
            table = channel.accept(CALL_SECONDS, *shape)
            undo.pop_all()
        name = f"mask worker {index}, pid {location.pid}"
        is_remote = not location.is_direct
        return WorkerConnection(
            name, location.pid, channel, table, options.max_cache_bytes, is_remote
        ), location

    def _record_end(self, cause: EndCause, message: str) -> None:
        ends = self._status.ends
        self._note(
            ends={**ends, cause: ends.get(cause, 0) + 1}, last_end=bounded(message)
        )
        if cause == "died" and not self._options.max_replays:
            message += "; its requests end, because max_replays is 0: with 1 they would go on elsewhere"
        _log.warning("%s", message)

    def _error_of(self, cause: EndCause) -> GuidedError:
        """Return the error of the sequences that are lost with this incarnation."""
        status = self._status
        kind, how = _ENDS[cause]
        how = how.format(mib=self._memory >> 20, seconds=self._options.mask_limit)
        return kind(
            f"mask worker {status.index} (pid {status.pid}, incarnation {status.incarnation}) {how}"
        )

    def _watched(self, session: Session, watch: Watch) -> Verdict:
        """Wait until the incarnation ends or has to be ended."""
        poller = select.poll()
        for end in (watch.connection.channel.fd, session):
            # reports POLLHUP: the actor's process, or the driver, has ended
            poller.register(end, 0)
        while not poller.poll(TICK_SECONDS * 1000) and not self._pool.stopping.is_set():
            verdict = watch.look()
            if verdict is not None:
                return verdict
        return "died", []
