"""Supervisor: keeps one mask actor of a pool alive. Starts it, watches it, announces its end, starts the next one.

Each actor has one supervisor thread. `_live` is one incarnation of the actor, from start to end.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial

import psutil

from actors.cluster import Cluster, Session
from actors.connection import WorkerConnection
from actors.dispatcher import Dispatcher
from actors.mask_actor import ActorLocation
from actors.processes import (
    RETRY_SECONDS,
    START_SECONDS,
    TICK_SECONDS,
    kill,
    memory_limit,
    package_version,
    resident_bytes,
)
from actors.protocol import IDLE, IMPORTING, Channel, Segment
from guided.bitmask import words
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, WorkerDied, bounded
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import EndCause, WorkerState, WorkerStatus
from guided.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps actor `index` of a pool alive.

    Args:
        dispatcher: is told of workers that come and go.
    """

    def __init__(
        self, index: int, cluster: Cluster, vocabulary: Vocabulary, options: RayPoolOptions, dispatcher: Dispatcher
    ) -> None:
        self.index = index
        """Number of the actor in its pool."""
        self.started: Future[None] = Future()
        """Done once the first incarnation is up. Raises `PoolUnavailable` if it did not start."""
        self._cluster = cluster
        self._vocabulary = vocabulary
        self._options = options
        self._memory = memory_limit(options.actor_memory_bytes)
        self._dispatcher = dispatcher
        self._state: WorkerState = "starting"
        self._incarnation = 0
        """Number of times that the actor has been started."""
        self._up: tuple[WorkerConnection, ActorLocation] | None = None
        """Set while the actor is up."""
        self._stopping = threading.Event()
        self._causes: Counter[str] = Counter()
        self._last_end: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{index}", daemon=True)
        self._thread.start()

    def status(self) -> WorkerStatus:
        """Return a snapshot. From any thread."""
        connection, location = self._up or (None, None)
        return WorkerStatus(
            index=self.index,
            incarnation=self._incarnation,
            state=self._state,
            pid=location and location.pid,
            node=location and location.host,
            node_id=location and location.node_id,
            open_sequences=0 if connection is None else len(connection.sequences),
            restarts=max(0, self._incarnation - 1),
            ends=dict(self._causes),
            last_end=self._last_end,
        )

    def stop(self) -> None:
        """Begin to end the actor for good, whether it is up or still starting. `join` waits for the end."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the actor."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._live()
            except Exception as raised:
                reason = raised if isinstance(raised, GuidedError) else bounded(raised)
                error = PoolUnavailable(f"mask actor {self.index} did not start: {reason}")
                if not self.started.done():
                    self.started.set_exception(error)
                if not self._stopping.is_set():
                    self._state = "down"
                    self._record_end("not_started", error.message)
                self._stopping.wait(RETRY_SECONDS)

    def _live(self) -> None:
        """Run one incarnation from start to end. Raises if it does not start."""
        began = time.monotonic()
        process: psutil.Process | None = None
        """None: it is on another node."""
        session = self._cluster.session(self._stopping)
        where = (*self._cluster.reserved(self._options), self.index)
        arguments = (self._vocabulary, self._memory, self._options.forced_tokens)
        try:
            location: ActorLocation = session.ask("bring the actor up", "create", *where, *arguments)
            self._incarnation += 1
            if location.version != package_version():
                raise PoolUnavailable(
                    f"{location.host} has version {location.version or 'unknown'} of guided, and this process "
                    f"{package_version() or 'unknown'}: install the same one on all nodes"
                )
            connection, is_local = self._connect(session, location.host, location.pid)
            process = psutil.Process(location.pid) if is_local else None
            _log.info("mask actor %d (pid %d) is up after %.1f s", self.index, location.pid, time.monotonic() - began)
            self._up, self._state = (connection, location), "up"
            self._dispatcher.announce(partial(self._dispatcher.add, connection))
            if not self.started.done():
                self.started.set_result(None)
            try:
                cause, slot = self._watch(session, process, connection)
            finally:
                self._up, self._state = None, "restarting"
            error = self._error_of(cause, location.pid)
            if not self._stopping.is_set():
                self._record_end(cause, error.message)
            if cause != "died" and process is not None:
                kill(process)
            self._dispatcher.announce(partial(self._dispatcher.end, connection, error, cause, slot))
        finally:
            session.close()  # first, because Ray would report a kill as an unexpected death
            if process is not None:
                kill(process, after=1.0)

    def _connect(self, session: Session, host: str, pid: int) -> tuple[WorkerConnection, bool]:
        """Connect to the actor, with a new slot table: directly if it can reach our memory, otherwise through Ray.

        Returns:
            The connection, and whether it is direct: then the actor is on this node, and not in another container.
        """
        action = "connect the actor"
        slots, width = self._options.slots, words(self._vocabulary.padded_vocab_size)
        segment, channel = Segment(slots, width), Channel()
        try:
            is_local = session.ask(action, "call", "attach", channel.path, segment.name)
            if not is_local:
                session.ask(action, "call", "serve_remotely", slots, width)
                session.ask(action, "forward", channel.path, segment.name)
            if not channel.accept(START_SECONDS):
                raise PoolUnavailable(f"the actor on {host} cannot connect to this process")
        except BaseException:
            channel.close()
            segment.close()
            raise
        return WorkerConnection(f"mask worker {self.index}, pid {pid}", pid, channel, segment), is_local

    def _record_end(self, cause: EndCause, message: str) -> None:
        self._causes[cause] += 1
        self._last_end = bounded(message)
        if cause == "died" and not self._options.max_replays:
            message += "; its requests end, because max_replays is 0: with 1 they would go on elsewhere"
        _log.warning("%s", message)

    def _error_of(self, cause: EndCause, pid: int) -> GuidedError:
        """Return the error of the sequences that are lost with this incarnation."""
        worker = f"mask worker {self.index} (pid {pid}, incarnation {self._incarnation})"
        if self._stopping.is_set():
            return PoolUnavailable("the pool was shut down")
        if cause == "hung":
            return MaskTimeout(f"{worker} was killed: a mask took longer than {self._options.mask_limit:g} s")
        if cause == "memory":
            return BackendError(f"{worker} was killed: it took more than {self._memory >> 20} MiB of memory")
        return WorkerDied(f"{worker} died")

    def _watch(
        self, session: Session, process: psutil.Process | None, connection: WorkerConnection
    ) -> tuple[EndCause, int]:
        """Wait until the incarnation ends or has to be ended. Returns why, and the slot that is the reason.

        Of two rows over the limit it is the one that began last: if a row holds the interpreter lock, no other one
        begins after it. `IDLE`: the worker has not begun with what it was asked for.
        """
        limit = self._options.mask_limit
        filled, since = -1, 0.0
        """Masks so far, and `time.monotonic()` when the worker had last made progress, or nothing to do."""
        poller = select.poll()
        for end in (connection.channel.fd, session):
            poller.register(end, 0)  # reports POLLHUP: the actor's process, or the driver, has ended
        while not poller.poll(TICK_SECONDS * 1000) and not self._stopping.is_set():
            now, busy, was = time.monotonic(), connection.busy(), filled
            filled = int(connection.table.mark["filled"][0])
            if busy or filled != was or not connection.has_work():
                since = now
            limits = {IMPORTING: START_SECONDS}
            overdue = [(seconds, slot) for slot, seconds in busy if seconds > limits.get(slot, limit)]
            if overdue:
                return "hung", min(overdue)[1]
            if now - since > limit:
                return "hung", IDLE
            if process is not None and resident_bytes(process) > self._memory:
                return "memory", max([(seconds, slot) for slot, seconds in busy], default=(0.0, IDLE))[1]
        return "died", IDLE
