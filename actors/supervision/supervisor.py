"""Supervisor: keeps one mask actor of a pool alive. Starts it, watches it, announces its end, starts the next one.

Each actor has one supervisor thread. `_live` is one incarnation of the actor, from start to end.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from actors.channel import Channel
from actors.cluster import Cluster
from actors.driver.client import Driver, RemoteActor
from actors.driver.scheduling import Scheduling
from actors.processes import ActorLocation, ProcessHandle, package_version
from actors.steps.connection import WorkerConnection
from actors.steps.dispatcher import WorkerDown, WorkerUp
from actors.steps.protocol import IDLE, IMPORTING, Segment
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, WorkerDied, bounded
from guided.pools.options import NodePlacement, RayPoolOptions
from guided.pools.protocol import EndCause, WorkerState, WorkerStatus
from guided.vocabulary import Vocabulary

_START_SECONDS = 120.0
"""Time limit for each answer of an actor that starts."""
_IMPORT_SECONDS = 60.0
"""Time limit for the import of a grammar library: seconds, or tens of seconds on a busy machine."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.5, 30.0
"""Shortest and longest pause before the next incarnation. It doubles with each early end in a row."""
_PROVEN_SECONDS = 2.0
"""An incarnation that was up for longer has filled masks, and did not end early, whatever ended it: a longer pause
before the next one would only delay the requests that wait."""
_TICK_MS = 200
"""Interval of memory readings: a process that takes 1 GiB/s is found 0.2 GiB above its limit."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncarnationSettings:
    """What every incarnation of a pool's actors is started with."""

    cluster: Cluster
    vocabulary: Vocabulary
    memory: int
    """Limit of one actor's memory, in bytes."""
    words: int
    """Words in one row's bitmask."""
    options: RayPoolOptions


class Supervisor:
    """Keeps actor `index` of a pool alive.

    Args:
        announce: takes the events of this actor; called from the supervisor's thread.
    """

    def __init__(
        self, index: int, settings: IncarnationSettings, announce: Callable[[WorkerUp | WorkerDown], None]
    ) -> None:
        self.index = index
        """Number of the actor in its pool."""
        self._settings = settings
        self._announce = announce
        self._state: WorkerState = "starting"
        self._incarnation = 0
        """Number of times that Ray has started the actor."""
        self._seconds_up = 0.0
        """Seconds that the incarnation was up. Set when it has ended."""
        self._actor: RemoteActor | None = None
        self._up: tuple[WorkerConnection, ActorLocation] | None = None
        """Set while the actor is up."""
        self._stopping = threading.Event()
        self._first_try = threading.Event()
        """Set once the first incarnation is up, or did not start."""
        self._error: GuidedError | None = None
        self._causes: Counter[str] = Counter()
        self._last_end: str | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # once nothing can write to it any more
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{index}", daemon=True)
        self._thread.start()

    def wait_started(self, seconds: float) -> bool:
        """Wait for the first incarnation, at most `seconds`. Returns whether it is up.

        Raises:
            PoolUnavailable: it did not start; says why.
        """
        if not self._first_try.wait(seconds):
            return False
        if self._error is not None:
            raise PoolUnavailable(f"mask actor {self.index} did not start: {self._error}") from self._error
        return True

    def status(self) -> WorkerStatus:
        """Return a snapshot. From any thread."""
        up = self._up
        location = None if up is None else up[1]
        return WorkerStatus(
            index=self.index,
            incarnation=self._incarnation,
            state=self._state,
            pid=None if location is None else location.pid,
            node=None if location is None else location.host,
            node_id=None if location is None else location.node_id,
            open_sequences=0 if up is None else len(up[0].sequences),
            restarts=max(0, self._incarnation - 1),
            ends=dict(self._causes),
            last_end=self._last_end,
        )

    def stop(self) -> None:
        """Begin to end the actor for good, whether it is up or still starting. `join` waits for the end."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        actor = self._actor
        if actor is not None:
            actor.end()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the actor. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        early_ends = 0
        while not self._stopping.is_set():
            if not self._settings.cluster.connected.wait(_TICK_MS / 1000):
                continue  # Ray is lost, not the actor: no reason for a longer pause
            self._seconds_up = 0.0
            try:
                self._live()
            except Exception as error:
                self._error = error if isinstance(error, GuidedError) else PoolUnavailable(bounded(error))
                if not self._stopping.is_set():
                    self._record_end("not_started", f"mask actor {self.index} did not start: {self._error}")
            self._first_try.set()
            early_ends = 0 if self._seconds_up > _PROVEN_SECONDS else early_ends + 1
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** max(0, early_ends - 1), _LAST_PAUSE_SECONDS)
            self._state = "down" if pause == _LAST_PAUSE_SECONDS else "restarting"
            if self._state == "down":
                text = "mask actor %d is down: it ended %d times in a row; next attempt in %g s"
                _log.error(text, self.index, early_ends, pause)
            self._stopping.wait(pause)

    def _live(self) -> None:
        """Run one incarnation from start to end. Raises if it does not start."""
        began = time.monotonic()
        driver, _ = self._settings.cluster.driver()
        actor = self._actor = self._wait(self._create_actor(driver), _START_SECONDS, "start an actor")
        self._incarnation += 1
        process = ProcessHandle(None)
        try:
            location: ActorLocation = self._wait(actor.call("location"), _START_SECONDS, "bring the actor up")
            if location.version != package_version():
                raise PoolUnavailable(
                    f"{location.host} has version {location.version or 'unknown'} of guided, and this process "
                    f"{package_version() or 'unknown'}: install the same one on all nodes"
                )
            connection, is_local = self._connect(actor, location)
            process = ProcessHandle(location.pid if is_local else None)
            _log.info("mask actor %d (pid %d) is up after %.1f s", self.index, location.pid, time.monotonic() - began)
            self._serve(actor, process, connection, location)
        finally:
            self._actor = None
            actor.end()  # first, because Ray would report a kill as an unexpected death
            process.kill(after=1.0)

    def _create_actor(self, driver: Driver) -> Future[Any]:
        settings = self._settings
        return driver.create(
            "actors.supervision.mask_actor:MaskActor",
            settings.vocabulary,
            settings.memory,
            scheduling=Scheduling(
                NodePlacement.parse(settings.options.placement),
                settings.cluster.reserved(settings.options.actor_cpus),
                self.index,
            ),
        )

    def _wait(self, answer: Future[Any], seconds: float, action: str) -> Any:
        """Wait for Ray or the actor. Raises if there is no answer within `seconds`, or the pool is shut down."""
        deadline = time.monotonic() + seconds
        while not answer.done():
            wait([answer], _TICK_MS / 1000)
            if self._stopping.is_set():
                raise PoolUnavailable("the pool was shut down")
            if time.monotonic() > deadline:
                raise PoolUnavailable(f"Ray did not {action} within {seconds:g} s")
        return answer.result()

    def _connect(self, actor: RemoteActor, location: ActorLocation) -> tuple[WorkerConnection, bool]:
        """Connect to the actor, with a new slot table: directly if it can reach our memory, otherwise through Ray.

        Returns:
            The connection, and whether it is direct: then the actor is on this node, and not in another container.
        """
        settings = self._settings
        segment, channel = Segment(settings.options.slots, settings.words), Channel()
        try:
            is_local = self._wait(actor.call("attach", channel.path, segment.name), _START_SECONDS, "connect the actor")
            if not is_local:
                serve = actor.call("serve_remotely", settings.options.slots, settings.words)
                self._wait(serve, _START_SECONDS, "connect the actor")
                self._wait(actor.forward(channel.path, segment.name), _START_SECONDS, "connect the actor")
            if not channel.accept(_START_SECONDS):
                raise PoolUnavailable(f"the actor on {location.host} cannot connect to this process")
        except BaseException:
            channel.close()
            segment.close()
            raise
        name = f"mask worker {self.index}, pid {location.pid}"
        return WorkerConnection(name, location.pid, channel, segment), is_local

    def _serve(
        self, actor: RemoteActor, process: ProcessHandle, connection: WorkerConnection, location: ActorLocation
    ) -> None:
        """Announce the actor to the dispatcher, and watch it until it ends or has to be ended."""
        up_since = time.monotonic()
        self._up = connection, location
        self._state = "up"
        self._announce(WorkerUp(connection))
        self._first_try.set()
        try:
            cause, slot = self._watch(actor, process, connection)
        finally:
            self._up = None
            self._state = "restarting"
            self._seconds_up = time.monotonic() - up_since
        if self._stopping.is_set():
            self._announce(WorkerDown(connection, PoolUnavailable("the pool was shut down")))
        else:
            error = self._failure(location.pid, cause)
            self._record_end(cause, error.message)
            process.kill()
            self._announce(WorkerDown(connection, error, cause, slot))

    def _record_end(self, cause: EndCause, message: str) -> None:
        self._causes[cause] += 1
        self._last_end = bounded(message)
        if cause == "died" and not self._settings.options.max_replays:
            message += "; its requests end, because max_replays is 0: with 1 they would go on elsewhere"
        _log.warning("%s", message)

    def _failure(self, pid: int, cause: EndCause) -> GuidedError:
        """Return the error of the sequences that are lost with this incarnation."""
        worker = f"mask worker {self.index} (pid {pid}, incarnation {self._incarnation})"
        if cause == "hung":
            return MaskTimeout(f"{worker} was killed: a mask took longer than {self._settings.options.mask_limit:g} s")
        if cause == "memory":
            return BackendError(f"{worker} was killed: it took more than {self._settings.memory >> 20} MiB of memory")
        return WorkerDied(f"{worker} died")

    def _watch(self, actor: RemoteActor, process: ProcessHandle, connection: WorkerConnection) -> tuple[EndCause, int]:
        """Wait until the incarnation ends or has to be ended. Returns why, and the slot that is the reason."""
        progress = _Progress(connection, self._settings.options.mask_limit)
        poller = select.poll()
        poller.register(connection.channel.fd, 0)  # reports POLLHUP
        for fd in (self._wake, *([process.fd] if process.fd >= 0 else [])):
            poller.register(fd, select.POLLIN)
        while not self._stopping.is_set():
            if poller.poll(_TICK_MS) or actor.is_lost:
                return "died", IDLE
            overdue = progress.overdue()
            if overdue is not None:
                return "hung", overdue
            if process.resident() > self._settings.memory:
                return "memory", max([(seconds, slot) for slot, seconds in connection.busy()], default=(0.0, IDLE))[1]
        return "died", IDLE


class _Progress:
    """Tells whether a worker has taken too long for a mask.

    Args:
        mask_limit: seconds for one mask.
    """

    def __init__(self, connection: WorkerConnection, mask_limit: float) -> None:
        self._connection = connection
        self._mask_limit = mask_limit
        self._filled = -1
        self._since = 0.0
        """`time.monotonic()` when the worker had last made progress, or nothing to do."""

    def overdue(self) -> int | None:
        """Return the slot of a row that has exceeded the limit; None if there is none.

        Of two rows the one that began last: if a row holds the interpreter lock, no other one begins after it. `IDLE`:
        the worker has not begun with what it was asked for.
        """
        connection, now = self._connection, time.monotonic()
        busy = connection.busy()
        filled = int(connection.table.mark["filled"][0])
        if busy or filled != self._filled or not connection.has_work():
            self._filled, self._since = filled, now
        limits = {IMPORTING: _IMPORT_SECONDS}
        overdue = [(seconds, slot) for slot, seconds in busy if seconds > limits.get(slot, self._mask_limit)]
        if overdue:
            return min(overdue)[1]
        return IDLE if now - self._since > self._mask_limit else None
