"""MaskActor: a mask worker's home, as Ray sees it. What is rare goes through Ray, a step never does."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import ray
import zmq

from actors.address import Address
from actors.channel import connect
from actors.memory import MemoryLimit, stay_within
from actors.owner import Owner, exit_with
from actors.pieces import joined
from actors.segment import Rows, SegmentName, attach
from actors.step_loop import StepLoop
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.worker import MaskWorker

__all__ = ["ORDERED", "Installable", "MaskActor", "Place"]

ORDERED = "grammars"
"""The concurrency group whose calls run one after the other, in the order of the calls."""

_SWITCH_SECONDS = 0.0005
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    pid: int
    node_id: str
    host: str


@dataclass(frozen=True, slots=True)
class Installable:
    """A compiled grammar on its way to a worker; what was dumped travels beside it."""

    key: str
    backend: str
    pieces: tuple[bytes, ...]
    """Of the constraint: arguments of their own, see `actors.pieces`."""


class MaskActor:
    """Hosts one `MaskWorker`. Every method may be called again with the same arguments: a call through Ray may be
    reported as failed though it ran.

    Args:
        owner: the engine's process; this one ends with it.
        memory: what this process may take.
    """

    def __init__(self, owner: Owner, memory: MemoryLimit) -> None:
        near = exit_with(owner)
        stay_within(memory, watched=near)
        leave_out_torch()
        # A backend that is loaded in Python holds the lock for as long as it may, at every row of a step again.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._node_id = str(ray.get_runtime_context().get_node_id())
        vocabulary = owner.fetch()
        self._backends = Backends(vocabulary)
        # The others, which take seconds and hundreds of megabytes, when they are first needed.
        self._backends[next(iter(BACKENDS))]
        self._worker = MaskWorker(vocabulary)
        self._installed: set[str] = set()
        self._installing = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._incarnation: int | None = None

    def place(self) -> Place:
        """Where this is; also the sign that it is alive."""
        return Place(os.getpid(), self._node_id, platform.node())

    def attach(self, incarnation: int, address: Address, segment: SegmentName, shared: bool) -> bool:
        """Connect to the engine and serve steps from now on.

        Args:
            shared: write into the engine's `segment`; else rows travel over the connection.

        Returns:
            Whether it does. False: that memory can't be reached from here (nothing was started).
        """
        if self._incarnation == incarnation:
            return True
        rows = attach(segment) if shared else Rows.private(segment.rows, segment.words)
        if rows is None:
            return False
        socket = connect(self._context, address)
        StepLoop(incarnation, self._worker, socket, rows, shared, partial(os._exit, 1)).start()
        self._incarnation = incarnation
        return True

    def install(self, key: str, backend: str, dumped: bytes, *pieces: bytes) -> None:
        """Load a compiled grammar and make it available to the step loop; loading happens beside that."""
        with self._installing:
            if key in self._installed:
                return
            loaded = self._backends[backend].load(joined(pieces), dumped)
            self._worker.install(key, loaded)
            self._installed.add(key)

    def uninstall(self, keys: Sequence[str]) -> None:
        """Drop grammars that nobody uses any more; open matchers keep what they need."""
        with self._installing:
            for key in keys:
                self._installed.discard(key)
                self._worker.uninstall(key)

    def installed(self) -> Collection[str]:
        """Keys of the grammars that are available."""
        return sorted(self._installed)
