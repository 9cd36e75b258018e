"""Supervisor: keeps one of a pool's actors alive. Starts it, watches it, announces its end, starts the next one.

A thread an actor, so that its life reads from top to bottom: start, hand over, watch, end, wait, again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray
import zmq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.channel import Channel, Transport
from actors.cluster import Cluster
from actors.grammars import Grammars, Home
from actors.link import Link, Wired
from actors.mask_actor import ORDERED, MaskActor, Place
from actors.owner import Owner
from actors.segment import Segment
from guided.errors import GuidedError, MaskTimeout, PoolUnavailable, WorkerDied, bounded
from guided.pool import WorkerStatus

__all__ = ["Cause", "Down", "Plan", "Supervisor", "Up"]

_START_SECONDS = 120.0
_CONNECT_SECONDS = 30.0
_FIRST_DELAY_SECONDS = 0.5
_LAST_DELAY_SECONDS = 30.0
_CRASH_LOOP = 5
_CRASH_LOOP_SECONDS = 60.0
_TICK_MS = 500
_log = logging.getLogger(__name__)


Cause = Literal["died", "hung", "memory", "retired"]
"""Why an incarnation is over: it died by itself; it was ended for a mask that didn't come, or that took too much
memory; it had grown, and a fresh one takes its place."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every incarnation of a pool's actors is made with."""

    cluster: Cluster
    transport: Transport
    grammars: Grammars
    owner: Owner
    rows: int
    words: int
    mask_limit: float
    """Seconds after which an actor that owes an answer is taken for hung."""
    tcp: bool
    """Use TCP even where shared memory can be had."""
    spread: bool
    """Place actors on all nodes in turn, rather than on this one."""


@dataclass(frozen=True, slots=True)
class Up:
    """An incarnation that has all grammars in use: the engine's thread may place sequences on it."""

    link: Link


@dataclass(frozen=True, slots=True)
class Down:
    """An incarnation that is over."""

    link: Link
    error: GuidedError
    """For those who are lost: all with a matcher there where it `died`, else the one whose mask was being filled."""
    cause: Cause = "died"


class Supervisor:
    """Keeps actor `index` of a pool alive.

    Args:
        next_incarnation: gives numbers that no other incarnation of this pool has.
        announce: takes `Up` and `Down`; called from this supervisor's thread.
    """

    def __init__(
        self,
        index: int,
        plan: Plan,
        next_incarnation: Callable[[], int],
        announce: Callable[[Up | Down], None],
    ) -> None:
        self._index = index
        self._plan = plan
        self._next_incarnation = next_incarnation
        self._announce = announce
        self._state: Literal["starting", "up", "restarting", "down"] = "starting"
        self._link: Link | None = None
        self._home: Home | None = None
        self._incarnation = -1
        self._restarts = 0
        self._ends: deque[float] = deque(maxlen=_CRASH_LOOP)
        self._stopping = threading.Event()
        self._first_try = threading.Event()
        self._error: GuidedError | None = None
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
            pid=link.place.pid if link is not None else None,
            node=link.place.host if link is not None else None,
            open_sequences=len(link.sequences) if link is not None else 0,
            restarts=self._restarts,
        )

    def stop(self) -> None:
        """Begin to end the actor for good, starting or up; `join` waits for it."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        home = self._home
        if home is not None:
            with contextlib.suppress(Exception):
                ray.kill(home.actor)

    def join(self) -> None:
        """Wait until the actor is gone."""
        self._thread.join()

    def _run(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._live()
            except Exception as error:
                self._error = error if isinstance(error, GuidedError) else PoolUnavailable(bounded(error))
                if not self._stopping.is_set():
                    _log.exception("mask actor %d didn't start", self._index)
            self._first_try.set()
            now = time.monotonic()
            if now - started > _CRASH_LOOP_SECONDS:
                delay = _FIRST_DELAY_SECONDS
            self._ends.append(now)
            looping = len(self._ends) == _CRASH_LOOP and now - self._ends[0] < _CRASH_LOOP_SECONDS
            self._state = "down" if looping else "restarting"
            self._stopping.wait(_LAST_DELAY_SECONDS if looping else delay)
            delay = min(2 * delay, _LAST_DELAY_SECONDS)

    def _live(self) -> None:
        """One incarnation, from start to end. Raises what kept it from starting."""
        self._incarnation = self._next_incarnation()
        home = self._home = Home(_create(self._plan, self._index))
        process: _Process | None = None
        try:
            place: Place = ray.get(home.actor.place.remote(), timeout=_START_SECONDS)
            process = _Process(place, self._plan.cluster.node_id)
            link, channel = self._wire(home, place)
            try:
                self._plan.grammars.settle(home, _START_SECONDS)
            except BaseException:
                link.close()
                raise
            self._serve(home, link, channel, process)
        finally:
            self._home = None
            self._plan.grammars.leave(home)
            _kill(home.actor, process)

    def _wire(self, home: Home, place: Place) -> tuple[Link, Channel]:
        """Connect to the actor: shared memory and ipc where it can reach our memory, TCP else."""
        plan = self._plan
        segment = Segment(plan.rows, plan.words)
        near = place.node_id == plan.cluster.node_id and not plan.tcp
        for shared in (True, False) if near else (False,):
            channel = plan.transport.ipc() if shared else plan.transport.tcp()
            attached = home.actor.attach.remote(self._incarnation, channel.address, segment.name, shared)
            if ray.get(attached, timeout=_CONNECT_SECONDS) and channel.wait_connected(_CONNECT_SECONDS):
                wired = Wired(self._index, self._incarnation, place, channel, segment, shared, home.installed)
                return Link(wired), channel
            channel.close()
        segment.close()
        raise PoolUnavailable(f"the actor on {place.host} can't connect to {plan.cluster.host}")

    def _serve(self, home: Home, link: Link, channel: Channel, process: _Process) -> None:
        """In rotation, until it is over."""
        self._link = link
        self._state = "up"
        if self._first_try.is_set():
            self._restarts += 1
        self._announce(Up(link))
        self._plan.grammars.serve(home)
        self._first_try.set()
        who = f"mask worker {self._index} (pid {link.place.pid}, incarnation {link.incarnation})"
        try:
            hung = self._watch(link, channel, process)
        finally:
            home.serving = False
            self._link = None
            self._state = "restarting"
        if self._stopping.is_set():
            error: GuidedError = PoolUnavailable("the pool was shut down")
        elif hung:
            error = MaskTimeout(f"{who} was ended: a mask took longer than {self._plan.mask_limit:g} s")
        else:
            error = WorkerDied(f"{who} died")
        if not self._stopping.is_set():
            _log.warning("%s", error)
            process.kill()
        self._announce(Down(link, error, "hung" if hung else "died"))

    def _watch(self, link: Link, channel: Channel, process: _Process) -> bool:
        """Return when the incarnation is over (or to be ended); True where it hangs."""
        watched = zmq.Poller()
        watched.register(channel.monitor, zmq.POLLIN)
        watched.register(self._wake, zmq.POLLIN)
        if process.fd >= 0:
            watched.register(process.fd, zmq.POLLIN)
        while not self._stopping.is_set():
            happened = dict(watched.poll(_TICK_MS))
            if process.fd in happened or (channel.monitor in happened and channel.is_disconnected()):
                return False
            if link.overdue(self._plan.mask_limit):
                return True
        return False


class _Process:
    """An actor's process. On this node it can be watched and killed without Ray."""

    def __init__(self, place: Place, node_id: str) -> None:
        self.fd = -1
        if place.node_id == node_id:
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(place.pid)

    def kill(self, after: float = 0.0) -> None:
        """Kill it, if it doesn't end within `after` seconds, and see it gone. On another node that is Ray's to do."""
        if self.fd < 0:
            return
        gone = select.poll()
        gone.register(self.fd, select.POLLIN)
        if not gone.poll(after * 1000):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)
            gone.poll(5000)
        os.close(self.fd)
        self.fd = -1


def _create(plan: Plan, index: int) -> Any:
    # Actors that take no CPUs are put anywhere by Ray's "SPREAD", and by a soft affinity too (Ray 2.60, tried). A node
    # that is gone by now fails this incarnation; the next one looks again.
    nodes = plan.cluster.node_ids if plan.spread else [plan.cluster.node_id]
    strategy = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)
    # Grammars are loaded and dropped in the order asked for, in a group of their own: a ping overtakes them.
    remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2, concurrency_groups={ORDERED: 1})
    return remote(MaskActor).options(scheduling_strategy=strategy).remote(plan.owner)


def _kill(actor: Any, process: _Process | None) -> None:
    # Through Ray first: it reports a process that is killed behind its back as an accident.
    with contextlib.suppress(Exception):
        ray.kill(actor)
    if process is not None:
        process.kill(after=1.0)
