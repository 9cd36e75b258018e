"""MaskActor: a mask worker's home, as Ray sees it. What is rare goes through Ray, a step never does."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import TypeVar

import ray
import zmq

from actors.channel import Address, connect
from actors.compile.loading import from_chunks
from actors.lean_imports import leave_out_torch
from actors.steps.protocol import SegmentName, SlotTable, attach
from actors.steps.server import StepServer
from actors.supervision.process import ActorLocation, MemoryLimit, Owner, exit_with_owner, limit_memory
from guided.backends import BACKENDS, Backends
from guided.worker import MaskWorker

__all__ = ["ORDERED", "MaskActor"]

ORDERED = "grammars"
"""The concurrency group whose calls run one after the other, in the order of the calls."""

_SWITCH_SECONDS = 0.0005
_Method = TypeVar("_Method")
_log = logging.getLogger(__name__)


def _in_order(method: _Method) -> _Method:
    """Have calls of an actor's method run one after the other, in the order in which they were made."""
    decorated: _Method = ray.method(concurrency_group=ORDERED)(method)
    return decorated


class MaskActor:
    """Hosts one `MaskWorker`. Every method may be called again with the same arguments: a call through Ray may be
    reported as failed though it ran.

    Args:
        owner: the engine's process; this one ends with it.
        memory: what this process may take.
    """

    def __init__(self, owner: Owner, memory: MemoryLimit) -> None:
        near = exit_with_owner(owner)
        limit_memory(memory, watched=near)
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

    def place(self) -> ActorLocation:
        """Where this is; also the sign that it is alive."""
        return ActorLocation(os.getpid(), self._node_id, platform.node())

    def attach(self, incarnation: int, address: Address, segment: SegmentName, shared: bool) -> bool:
        """Connect to the engine and serve steps from now on.

        Args:
            shared: write into the engine's `segment`; else rows travel over the connection.

        Returns:
            Whether it does. False: that memory can't be reached from here (nothing was started).
        """
        if self._incarnation == incarnation:
            return True
        table = attach(segment) if shared else SlotTable.private(segment.slots, segment.words)
        if table is None:
            return False
        StepServer(self._worker, connect(self._context, address), table, shared, partial(os._exit, 1)).start()
        self._incarnation = incarnation
        return True

    @_in_order
    def install(self, key: str, backend: str, dumped: bytes, *pieces: bytes) -> None:
        """Load a compiled grammar and make it available to the step loop; loading happens beside that."""
        with self._installing:
            if key in self._installed:
                return
            loaded = self._backends[backend].load(from_chunks(pieces), dumped)
            self._worker.install(key, loaded)
            self._installed.add(key)

    @_in_order
    def uninstall(self, keys: Sequence[str]) -> None:
        """Drop grammars that nobody uses any more; open matchers keep what they need."""
        with self._installing:
            for key in keys:
                self._installed.discard(key)
                self._worker.uninstall(key)

    def installed(self) -> Collection[str]:
        """Keys of the grammars that are available."""
        return sorted(self._installed)
