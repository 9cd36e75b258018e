"""Supervisor: keeps one of a pool's actors alive. Starts it, watches it, announces its end, starts the next one.

A thread an actor, so that its life reads from top to bottom: start, hand over, watch, end, wait, again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ray
import zmq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.channel import Channel, Transport
from actors.cluster import Cluster, call_in_thread
from actors.compile.grammars import Grammars
from actors.compile.loading import ActorHandle
from actors.steps.connection import WorkerConnection
from actors.steps.placement import Cause, WorkerDown, WorkerRetiring, WorkerUp
from actors.steps.protocol import Segment
from actors.supervision.mask_actor import ORDERED, MaskActor
from actors.supervision.process import ActorLocation, MemoryLimit, Owner, ProcessReading
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, WorkerDied, bounded
from guided.pool import WorkerStatus

__all__ = ["IncarnationSettings", "Supervisor"]

_START_SECONDS = 120.0
_CONNECT_SECONDS = 30.0
_CREATE_SECONDS = 30.0
_FIRST_DELAY_SECONDS = 0.5
_LAST_DELAY_SECONDS = 30.0
_CRASH_LOOP = 5
_CRASH_LOOP_SECONDS = 60.0
_PROVEN_SECONDS = 2.0
"""An incarnation that was up for so long is no part of a crash loop, whatever ended it: masks were had from it, and a
longer pause before the next one would keep them from those who wait."""
_TICK_MS = 200
"""What eats a gigabyte a second is a fifth of one over its limit when it is seen."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncarnationSettings:
    """What every incarnation of a pool's actors is made with."""

    cluster: Cluster
    transport: Transport
    grammars: Grammars
    owner: Owner
    slots: int
    words: int
    mask_limit: float
    """Seconds after which an actor that owes an answer, or that was stopped, is taken for hung."""
    memory: MemoryLimit
    """Of one actor."""
    tcp: bool
    """Use TCP even where shared memory can be had."""
    spread: bool
    """ActorLocation actors on all nodes in turn, rather than on this one."""


class Supervisor:
    """Keeps actor `index` of a pool alive.

    Args:
        next_incarnation: gives numbers that no other incarnation of this pool has.
        announce: takes what comes and goes; called from this supervisor's thread.
    """

    def __init__(
        self,
        index: int,
        plan: IncarnationSettings,
        next_incarnation: Callable[[], int],
        announce: Callable[[WorkerUp | WorkerRetiring | WorkerDown], None],
    ) -> None:
        self._index = index
        self._plan = plan
        self._next_incarnation = next_incarnation
        self._announce = announce
        self._state: Literal["starting", "up", "restarting", "down"] = "starting"
        self._link: WorkerConnection | None = None
        self._home: ActorHandle | None = None
        self._process: _Process | None = None
        self._incarnation = -1
        self._restarts = 0
        self._ends: deque[float] = deque(maxlen=_CRASH_LOOP)
        self._stopping = threading.Event()
        self._first_try = threading.Event()
        self._error: GuidedError | None = None
        self._causes: Counter[str] = Counter()
        self._last_end: str | None = None
        self._began = 0.0
        """`time.monotonic()` of when this incarnation was started."""
        self._up_since = math.inf
        """And of when it was up."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not before nobody can write to it any more.
        weakref.finalize(self, os.close, self._wake)
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{index}", daemon=True)
        self._thread.start()

    def wait_started(self) -> None:
        """Wait for the first incarnation.

        Raises:
            PoolUnavailable: it didn't start; says why.
        """
        self._first_try.wait()
        if self._error is not None:
            raise PoolUnavailable(f"mask actor {self._index} didn't start: {self._error}") from self._error

    def status(self) -> WorkerStatus:
        """A snapshot; from any thread."""
        link = self._link
        return WorkerStatus(
            index=self._index,
            incarnation=self._incarnation,
            state=self._state,
            pid=link.location.pid if link is not None else None,
            node=link.location.host if link is not None else None,
            open_sequences=link.num_open if link is not None else 0,
            restarts=self._restarts,
            ends=dict(self._causes),
            last_end=self._last_end,
        )

    def stop(self) -> None:
        """Begin to end the actor for good, starting or up; `join` waits for it."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        home, process = self._home, self._process
        if home is not None:
            _kill(home.actor)
        if process is not None and self._plan.cluster.trouble is not None:
            process.signal()  # else Ray ends it, and would report as an accident what ends behind its back

    def join(self, seconds: float) -> bool:
        """Wait until the actor is gone; False where that takes longer."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._stopping.is_set():
            self._up_since = math.inf
            try:
                retired = self._live() == "retired"
            except Exception as error:
                retired = False
                self._error = error if isinstance(error, GuidedError) else PoolUnavailable(bounded(error))
                if not self._stopping.is_set():
                    self._note_end("not_started", f"mask actor {self._index} didn't start: {self._error}")
            self._first_try.set()
            if retired:
                continue
            now = time.monotonic()
            if now - self._up_since > _PROVEN_SECONDS:
                delay = _FIRST_DELAY_SECONDS
            else:
                self._ends.append(now)
            looping = len(self._ends) == _CRASH_LOOP and now - self._ends[0] < _CRASH_LOOP_SECONDS
            pause, delay = _LAST_DELAY_SECONDS if looping else delay, min(2 * delay, _LAST_DELAY_SECONDS)
            self._state = "down" if looping else "restarting"
            if looping:
                _log.error("mask actor %d is down: %d ends in a row; again in %g s", self._index, _CRASH_LOOP, pause)
            self._stopping.wait(pause)

    def _live(self) -> Cause:
        """One incarnation, from start to end. Raises what kept it from starting."""
        self._began = time.monotonic()
        self._incarnation = self._next_incarnation()
        self._plan.cluster.check()
        home = self._home = ActorHandle(self._wait(call_in_thread(self._create), _CREATE_SECONDS, "start an actor"))
        try:
            place: ActorLocation = self._wait(home.actor.place.remote().future(), _START_SECONDS, "bring the actor up")
            process = self._process = _Process(place, self._plan.cluster.node_id)
            link, channel = self._wire(home, place)
            try:
                self._plan.grammars.settle(home, _START_SECONDS)
            except BaseException:
                link.close()
                raise
            return self._serve(home, link, channel, process)
        finally:
            self._home = None
            self._plan.grammars.leave(home)
            # Through Ray first: it reports a process that is killed behind its back as an accident.
            _kill(home.actor)
            if self._process is not None:
                self._process.kill(after=1.0)
                self._process = None

    def _create(self) -> Any:
        # Actors that take no CPUs are put anywhere by Ray's "SPREAD", and by a soft affinity too (Ray 2.60, tried). A
        # node that is gone by now fails this incarnation; the next one looks again.
        cluster = self._plan.cluster
        nodes = cluster.node_ids if self._plan.spread else [cluster.node_id]
        strategy = NodeAffinitySchedulingStrategy(nodes[self._index % len(nodes)], soft=False)
        return _actor_class().options(scheduling_strategy=strategy).remote(self._plan.owner, self._plan.memory)

    def _wait(self, answer: Future[Any], seconds: float, what: str) -> Any:
        """What Ray, or the actor, answers. Raises where there is none within `seconds`, or none is wanted any more."""
        deadline = time.monotonic() + seconds
        while not answer.done():
            wait([answer], _TICK_MS / 1000)
            if self._stopping.is_set():
                raise PoolUnavailable("the pool was shut down")
            if time.monotonic() > deadline:
                raise PoolUnavailable(f"Ray didn't {what} within {seconds:g} s")
        return answer.result()

    def _wire(self, home: ActorHandle, place: ActorLocation) -> tuple[WorkerConnection, Channel]:
        """Connect to the actor: shared memory and ipc where it can reach our memory, TCP else."""
        plan = self._plan
        segment = Segment(plan.slots, plan.words)
        near = place.node_id == plan.cluster.node_id and not plan.tcp
        for shared in (True, False) if near else (False,):
            channel = plan.transport.ipc() if shared else plan.transport.tcp()
            attached = home.actor.attach.remote(self._incarnation, channel.address, segment.name, shared).future()
            connected = False
            try:
                connected = self._wait(attached, _CONNECT_SECONDS, "connect the actor")
                connected = connected and channel.wait_connected(_CONNECT_SECONDS)
            finally:
                if not connected:
                    channel.close()
            if connected:
                connection = WorkerConnection(
                    self._index, self._incarnation, place, channel, segment, shared, home.installed
                )
                return connection, channel
        segment.close()
        raise PoolUnavailable(f"the actor on {place.host} can't connect to {plan.cluster.host}")

    def _serve(self, home: ActorHandle, link: WorkerConnection, channel: Channel, process: _Process) -> Cause:
        """In rotation, until it is over."""
        self._link = link
        self._state = "up"
        self._up_since = time.monotonic()
        if self._first_try.is_set():
            self._restarts += 1
        self._announce(WorkerUp(link))
        self._plan.grammars.serve(home)
        seconds, grammars = self._up_since - self._began, len(home.installed)
        _log.info(
            "mask actor %d (pid %d) is up after %.1f s: %d grammars", self._index, link.location.pid, seconds, grammars
        )
        self._first_try.set()
        try:
            cause = self._watch(home, link, channel, process)
        finally:
            home.serving = False
            self._link = None
            self._state = "restarting"
        if self._stopping.is_set():
            self._announce(WorkerDown(link, PoolUnavailable("the pool was shut down")))
        else:
            error = self._failure_of(link, cause)
            self._note_end(cause, error.message)
            process.kill()
            self._announce(WorkerDown(link, error, cause, loading=bool(home.loading)))
        return cause

    def _note_end(self, cause: str, message: str) -> None:
        self._causes[cause] += 1
        self._last_end = bounded(message)
        _log.log(logging.INFO if cause == "retired" else logging.WARNING, "%s", message)

    def _failure_of(self, link: WorkerConnection, cause: Cause) -> GuidedError:
        who = f"mask worker {self._index} (pid {link.location.pid}, incarnation {link.incarnation})"
        if cause == "hung":
            return MaskTimeout(f"{who} was ended: a mask took longer than {self._plan.mask_limit:g} s")
        if cause == "memory":
            return BackendError(f"{who} was ended: a mask took it beyond {self._plan.memory.hard >> 20} MiB of memory")
        if cause == "retired":
            return WorkerDied(f"{who} had grown: a fresh one takes its place")
        return WorkerDied(f"{who} died")

    def _watch(self, home: ActorHandle, link: WorkerConnection, channel: Channel, process: _Process) -> Cause:
        """Return when the incarnation is over (or to be ended), and why."""
        plan = self._plan
        watched = zmq.Poller()
        watched.register(channel.monitor, zmq.POLLIN)
        watched.register(self._wake, zmq.POLLIN)
        if process.fd >= 0:
            watched.register(process.fd, zmq.POLLIN)
        fresh = process.look()
        soft = plan.memory.soft(fresh.resident) if fresh is not None else 0
        ran = time.monotonic()
        while not self._stopping.is_set():
            happened = dict(watched.poll(_TICK_MS))
            if process.fd in happened or (channel.monitor in happened and channel.is_disconnected()):
                return "died"
            if link.overdue(plan.mask_limit) or plan.grammars.hangs(home):
                return "hung"
            look = process.look()
            if look is None:  # on another node, where it looks after its memory itself; or just gone
                continue
            if look.resident > plan.memory.hard:
                return "memory"
            if not look.stopped:
                ran = time.monotonic()
            elif time.monotonic() - ran > plan.mask_limit:
                return "hung"
            if link.retiring:
                if not link.num_open:
                    return "retired"
            elif look.resident > soft:
                link.retiring = True
                _log.info("mask worker %d takes %d MiB: it is replaced", self._index, look.resident >> 20)
                self._announce(WorkerRetiring(link))
        return "died"


class _Process:
    """An actor's process. On this node it can be watched and killed without Ray."""

    def __init__(self, place: ActorLocation, node_id: str) -> None:
        self.fd = -1
        self._pid = place.pid
        if place.node_id == node_id:
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(place.pid)

    def look(self) -> ProcessReading | None:
        """How it is; None on another node, or where it is gone."""
        return ProcessReading.of(self._pid) if self.fd >= 0 else None

    def signal(self) -> None:
        """SIGKILL, from any thread. On another node that is Ray's to do."""
        with contextlib.suppress(OSError):
            if self.fd >= 0:
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def kill(self, after: float = 0.0) -> None:
        """Kill it, if it doesn't end within `after` seconds, and see it gone. Idempotent."""
        if self.fd < 0:
            return
        gone = select.poll()
        gone.register(self.fd, select.POLLIN)
        if not gone.poll(after * 1000):
            self.signal()
            gone.poll(5000)
        fd, self.fd = self.fd, -1
        os.close(fd)


@cache
def _actor_class() -> Any:
    # Once: for every such class Ray keeps a definition. Grammars are loaded and dropped in the order asked for, in a
    # group of their own: a ping overtakes them.
    return ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2, concurrency_groups={ORDERED: 1})(MaskActor)


def _kill(actor: Any) -> None:
    if ray.is_initialized():  # else this would start a Ray of its own
        with contextlib.suppress(Exception):
            ray.kill(actor)
