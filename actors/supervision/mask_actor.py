"""MaskActor: the Ray actor that a mask worker runs in. Rare calls go through Ray, the messages of a step never do."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, TypeVar

import ray
import zmq
from msgspec.msgpack import Decoder

from actors.channel import Address, connect
from actors.processes import ProcessLocation, enter_session, exit_with_owner, limit_memory, memory_limit
from actors.steps.protocol import SegmentName, SlotTable, attach
from actors.steps.server import StepServer
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.constraint import Constraint
from guided.process_memory import FreeMemory
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

IN_ORDER = "grammars"
"""The concurrency group of the calls that run one after the other, in the order in which they were made."""
_SWITCH_SECONDS = 0.0005
_LOADING_NICENESS = 5
"""Added to the process's own. Loading a large grammar takes half a second of a core: the masks have precedence."""
_decode = Decoder(Constraint).decode
_Method = TypeVar("_Method")


def _in_order(method: _Method) -> _Method:
    decorated: _Method = ray.method(concurrency_group=IN_ORDER)(method)
    return decorated


def _lower_priority() -> None:
    """Lower the priority of this thread, once."""
    priority = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _LOADING_NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)


class MaskActor:
    """Runs one `MaskWorker`. Every method is idempotent: Ray may report a call as failed although it ran.

    Args:
        owner: the engine's process; this process ends with it.
        memory: limit of this process's memory in bytes.
    """

    RAY_OPTIONS: ClassVar = {"max_restarts": 0, "max_concurrency": 2, "concurrency_groups": {IN_ORDER: 1}}

    def __init__(self, owner: ProcessLocation, vocabulary: Vocabulary, memory: int) -> None:
        is_beside_owner = exit_with_owner(owner)
        limit_memory(memory_limit(memory), watched=is_beside_owner)  # this node may have less memory than the engine's
        enter_session()
        leave_out_torch()
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # to Ray's file of this process
        # A backend in Python holds the interpreter lock for the whole switch interval, in every row of a step.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._backends = Backends(vocabulary)
        # The other backends take seconds and hundreds of megabytes. They are loaded when first needed.
        self._backends[next(iter(BACKENDS))]
        self._worker = MaskWorker(vocabulary)
        self._installed: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._incarnation: int | None = None
        FreeMemory().watch()

    def location(self) -> ProcessLocation:
        """Return where this actor runs; also shows that it is alive."""
        return ProcessLocation.of_this_actor()

    def attach(self, incarnation: int, address: Address, segment: SegmentName, shared: bool) -> bool:
        """Connect to the engine and start to serve steps.

        Args:
            shared: write rows into the engine's shared memory `segment`. If not, rows are sent over the connection.

        Returns:
            False if the shared memory cannot be reached from here; nothing was started then.
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
    def install(self, key: str, backend: str, dumped: bytes, constraint: bytes) -> None:
        """Load a compiled grammar and make it available to the step loop, which goes on meanwhile."""
        if key not in self._installed:
            _lower_priority()
            self._worker.install(key, self._backends[backend].load(_decode(constraint), dumped))
            self._installed.add(key)

    @_in_order
    def uninstall(self, keys: Sequence[str]) -> None:
        """Drop grammars that are not used any more; open matchers keep what they need."""
        for key in keys:
            self._installed.discard(key)
            self._worker.uninstall(key)
