"""Supervisor: keeps one mask actor of a pool alive. Starts it, watches it, announces its end, starts the next one.

Each actor has one supervisor thread. `_live` is one incarnation of the actor, from start to end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import zmq

from actors.channel import Channel, Transport
from actors.cluster import Cluster
from actors.compile.grammars import Grammars
from actors.compile.loading import ActorHandle
from actors.driver.client import Driver
from actors.driver.messages import Connected
from actors.driver.scheduling import Scheduling
from actors.processes import ProcessHandle, ProcessLocation, kill_actor, package_version, soft_limit
from actors.steps.connection import WorkerConnection
from actors.steps.placement import WorkerDown, WorkerRetiring, WorkerUp
from actors.steps.protocol import Segment
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, WorkerDied, bounded
from guided.pools.options import NodePlacement, RayPoolOptions
from guided.pools.protocol import EndCause, WorkerState, WorkerStatus
from guided.vocabulary import Vocabulary

_START_SECONDS = 120.0
_CONNECT_SECONDS = 30.0
_CREATE_SECONDS = 30.0
_CRASH_LOOP = 5
_CRASH_LOOP_SECONDS = 60.0
_LAST_DELAY_SECONDS = 30.0
_PROVEN_SECONDS = 2.0
"""An incarnation that was up for longer has filled masks. It does not count towards a crash loop, whatever ended it: a
longer pause before the next one would only delay the requests that wait."""
_TICK_MS = 200
"""Interval of memory readings: a process that takes 1 GiB/s is found 0.2 GiB above its limit."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncarnationSettings:
    """What every incarnation of a pool's actors is started with."""

    cluster: Cluster
    transport: Transport
    grammars: Grammars
    vocabulary: Vocabulary
    memory: int
    """Limit of one actor's memory, in bytes."""
    words: int
    """Words in one row's bitmask."""
    options: RayPoolOptions


class RestartPolicy:
    """The pause before the next incarnation: exponential back-off, reset by an incarnation that was up for a while.

    Args:
        first_delay: seconds.
        clock: returns seconds.
    """

    def __init__(self, first_delay: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_delay = self._delay = first_delay
        self._clock = clock
        self._early_ends: deque[float] = deque(maxlen=_CRASH_LOOP)

    def next_pause(self, seconds_up: float) -> tuple[float, bool]:
        """Return the seconds to wait after an incarnation that was up for `seconds_up`, and whether the actor is in a
        crash loop."""
        now = self._clock()
        if seconds_up > _PROVEN_SECONDS:
            self._delay = self._first_delay
        else:
            self._early_ends.append(now)
        crash_loop = len(self._early_ends) == _CRASH_LOOP and now - self._early_ends[0] < _CRASH_LOOP_SECONDS
        pause = _LAST_DELAY_SECONDS if crash_loop else self._delay
        self._delay = min(2 * self._delay, _LAST_DELAY_SECONDS)
        return pause, crash_loop


class Supervisor:
    """Keeps actor `index` of a pool alive.

    Args:
        next_incarnation: returns a number that no other incarnation of this pool has.
        announce: takes the events of this actor; called from the supervisor's thread.
        restarts: None is `RestartPolicy()`.
    """

    def __init__(
        self,
        index: int,
        settings: IncarnationSettings,
        next_incarnation: Callable[[], int],
        announce: Callable[[WorkerUp | WorkerRetiring | WorkerDown], None],
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._index = index
        self._settings = settings
        self._next_incarnation = next_incarnation
        self._announce = announce
        self._restart_policy = restarts or RestartPolicy()
        self._state: WorkerState = "starting"
        self._number = -1
        """Number of the current incarnation."""
        self._began = 0.0
        """`time.monotonic()` when the incarnation was started."""
        self._seconds_up = 0.0
        """Seconds that the incarnation was up. Set when it has ended."""
        self._handle: ActorHandle | None = None
        self._process: ProcessHandle | None = None
        self._connection: WorkerConnection | None = None
        """Set while the actor is up."""
        self._restarts = 0
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

    def wait_started(self) -> None:
        """Wait for the first incarnation.

        Raises:
            PoolUnavailable: it did not start; says why.
        """
        self._first_try.wait()
        if self._error is not None:
            raise PoolUnavailable(f"mask actor {self._index} did not start: {self._error}") from self._error

    def status(self) -> WorkerStatus:
        """Return a snapshot. From any thread."""
        connection = self._connection
        location = None if connection is None else connection.location
        return WorkerStatus(
            index=self._index,
            incarnation=self._number,
            state=self._state,
            pid=None if location is None else location.pid,
            node=None if location is None else location.host,
            node_id=None if location is None else location.node_id,
            address=None if location is None else location.address,
            open_sequences=0 if connection is None else connection.num_open,
            restarts=self._restarts,
            ends=dict(self._causes),
            last_end=self._last_end,
        )

    def stop(self) -> None:
        """Begin to end the actor for good, whether it is up or still starting. `join` waits for the end."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        handle, process = self._handle, self._process
        if handle is not None:
            kill_actor(handle.actor, None)
        if process is not None and self._settings.cluster.trouble is not None:
            process.send_kill()  # otherwise Ray ends it, and would report the kill as unexpected

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the actor. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._settings.cluster.connected.wait(_TICK_MS / 1000):
                continue  # Ray is lost, not the actor: no reason for a longer pause
            self._seconds_up = 0.0
            try:
                is_expected = self._live() == "retired"
            except Exception as error:
                is_expected = False
                self._error = error if isinstance(error, GuidedError) else PoolUnavailable(bounded(error))
                if not self._stopping.is_set():
                    self._record_end("not_started", f"mask actor {self._index} did not start: {self._error}")
            self._first_try.set()
            if is_expected:
                continue
            pause, crash_loop = self._restart_policy.next_pause(self._seconds_up)
            self._state = "down" if crash_loop else "restarting"
            if crash_loop:
                text = "mask actor %d is down: it ended %d times in a row; next attempt in %g s"
                _log.error(text, self._index, _CRASH_LOOP, pause)
            self._stopping.wait(pause)

    def _live(self) -> EndCause:
        """Run one incarnation from start to end. Raises if it does not start."""
        self._began = time.monotonic()
        self._number = self._next_incarnation()
        grammars = self._settings.grammars
        driver, ray = self._settings.cluster.driver()
        actor = self._wait(self._create_actor(driver, ray), _CREATE_SECONDS, "start an actor")
        handle = self._handle = ActorHandle(actor)
        try:
            location: ProcessLocation = self._wait(actor.call("location"), _START_SECONDS, "bring the actor up")
            if location.version != package_version():
                raise PoolUnavailable(
                    f"{location.host} has version {location.version or 'unknown'} of guided, and this process "
                    f"{package_version() or 'unknown'}: install the same one on all nodes"
                )
            process = self._process = ProcessHandle(location.pid if location.is_beside(ray.node_id) else None)
            connection, channel = self._connect(handle, location, ray)
            try:
                grammars.add_actor(handle, _START_SECONDS)
            except BaseException:
                connection.close()
                raise
            return self._serve(handle, process, connection, channel)
        finally:
            self._handle = None
            grammars.remove_actor(handle)
            kill_actor(actor, self._process)
            self._process = None

    def _create_actor(self, driver: Driver, ray: Connected) -> Future[Any]:
        settings = self._settings
        owner = ProcessLocation.here(ray.node_id)
        return driver.create(
            "actors.supervision.mask_actor:MaskActor",
            owner,
            driver.stored(settings.vocabulary),
            settings.memory,
            scheduling=Scheduling(
                NodePlacement.parse(settings.options.placement),
                settings.cluster.reserved(settings.options.actor_cpus),
                self._index,
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

    def _connect(
        self, handle: ActorHandle, location: ProcessLocation, ray: Connected
    ) -> tuple[WorkerConnection, Channel]:
        """Connect to the actor: with shared memory and a Unix socket if it can reach our memory, otherwise by TCP."""
        settings, options = self._settings, self._settings.options
        segment = Segment(options.slots, settings.words)
        local = location.is_beside(ray.node_id) and options.transport != "tcp"
        for shared in (True, False) if local else (False,):
            channel = settings.transport.ipc() if shared else settings.transport.tcp()
            attached = handle.actor.call("attach", self._number, channel.address, segment.name, shared)
            connected = False
            try:
                connected = self._wait(attached, _CONNECT_SECONDS, "connect the actor")
                connected = connected and channel.wait_connected(_CONNECT_SECONDS)
            finally:
                if not connected:
                    channel.close()
            if connected:
                connection = WorkerConnection(
                    self._index, self._number, location, channel, segment, shared, handle.installed
                )
                return connection, channel
        segment.close()
        raise PoolUnavailable(f"the actor on {location.host} cannot connect to {ray.host}")

    def _serve(
        self, handle: ActorHandle, process: ProcessHandle, connection: WorkerConnection, channel: Channel
    ) -> EndCause:
        """Announce the actor to the dispatcher, and watch it until it ends or has to be ended."""
        up_since = time.monotonic()
        pid = connection.location.pid
        self._connection = connection
        self._state = "up"
        if self._first_try.is_set():
            self._restarts += 1
        self._announce(WorkerUp(connection))
        self._settings.grammars.start_serving(handle)
        text = "mask actor %d (pid %d) is up after %.1f s with %d grammars"
        _log.info(text, self._index, pid, up_since - self._began, len(handle.installed))
        self._first_try.set()
        try:
            cause = self._watch(handle, process, connection, channel)
        finally:
            handle.serving = False
            self._connection = None
            self._state = "restarting"
            self._seconds_up = time.monotonic() - up_since
        if self._stopping.is_set():
            self._announce(WorkerDown(connection, PoolUnavailable("the pool was shut down")))
        else:
            error = self._failure(pid, cause)
            self._record_end(cause, error.message)
            process.kill()
            self._announce(WorkerDown(connection, error, cause, loading=bool(handle.loading)))
        return cause

    def _record_end(self, cause: EndCause, message: str) -> None:
        self._causes[cause] += 1
        self._last_end = bounded(message)
        _log.log(logging.INFO if cause == "retired" else logging.WARNING, "%s", message)

    def _failure(self, pid: int, cause: EndCause) -> GuidedError:
        """Return the error of the sequences that are lost with this incarnation."""
        worker = f"mask worker {self._index} (pid {pid}, incarnation {self._number})"
        if cause == "hung":
            return MaskTimeout(f"{worker} was killed: a mask took longer than {self._settings.options.mask_limit:g} s")
        if cause == "memory":
            return BackendError(f"{worker} was killed: it took more than {self._settings.memory >> 20} MiB of memory")
        return WorkerDied(f"{worker} {'had grown and is replaced' if cause == 'retired' else 'died'}")

    def _watch(
        self, handle: ActorHandle, process: ProcessHandle, connection: WorkerConnection, channel: Channel
    ) -> EndCause:
        """Wait until the incarnation ends or has to be ended. Returns why."""
        monitor, mask_limit, memory = channel.monitor, self._settings.options.mask_limit, self._settings.memory
        poller = zmq.Poller()
        for watched in (monitor, self._wake, *([process.fd] if process.fd >= 0 else [])):
            poller.register(watched, zmq.POLLIN)
        fresh = process.read()
        retire_above = soft_limit(memory, fresh.resident) if fresh is not None else 0
        last_running = time.monotonic()
        while not self._stopping.is_set():
            events = dict(poller.poll(_TICK_MS))
            if process.fd in events or (monitor in events and channel.is_disconnected()):
                return "died"
            if handle.actor.is_lost:
                return "died"
            if connection.overdue(mask_limit) or handle.is_overdue():
                return "hung"
            if connection.retiring and not connection.num_open and not handle.loading:
                return "retired"
            reading = process.read()
            if reading is None:  # on another node, where it watches its memory itself; or it has just ended
                continue
            if reading.resident > memory:
                return "memory"
            if not reading.stopped:
                last_running = time.monotonic()
            elif time.monotonic() - last_running > mask_limit:
                return "hung"
            if reading.resident > retire_above and not connection.retiring:
                connection.retiring = True
                _log.info("mask worker %d takes %d MiB: it will be replaced", self._index, reading.resident >> 20)
                self._announce(WorkerRetiring(connection))
        return "died"
