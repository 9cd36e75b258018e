"""MaskActor: the Ray actor that a mask worker runs in. A step goes through Ray only to an actor on another node."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import ClassVar

import ray

from actors.channel import WorkerEnd
from actors.processes import ActorLocation, enter_session, limit_memory, memory_limit
from actors.steps.protocol import SegmentName, attach
from actors.steps.remote import RemoteSteps
from actors.steps.server import StepServer
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.process_memory import watch_free_memory
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

_SWITCH_SECONDS = 0.00005
"""Python's default, 5 ms, is what the second thread would wait for each time that a library returns to Python."""
_ANSWERS = "answers"
"""The concurrency group of the call that waits for masks."""


class MaskActor:
    """Runs one `MaskWorker`. Every method is idempotent: Ray may report a call as failed although it ran.

    Args:
        memory: limit of this process's memory in bytes.
    """

    RAY_OPTIONS: ClassVar = {"max_restarts": 0, "max_concurrency": 1, "concurrency_groups": {_ANSWERS: 1}}

    def __init__(self, vocabulary: Vocabulary, memory: int) -> None:
        limit_memory(memory_limit(memory))  # this node may have less memory than the engine's
        enter_session()
        leave_out_torch()
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # to Ray's file of this process
        # A backend in Python holds the interpreter lock for the whole switch interval, in every row of a step.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._backends = Backends(vocabulary)
        # The other backends take seconds and hundreds of megabytes. They are loaded when first needed.
        self._backends[next(iter(BACKENDS))]
        self._worker = MaskWorker(vocabulary)
        self._is_serving = False
        self._remote: RemoteSteps | None = None
        watch_free_memory()

    def location(self) -> ActorLocation:
        """Return where this actor runs; also shows that it is alive."""
        return ActorLocation.of_this_actor()

    def attach(self, path: str, segment: SegmentName) -> bool:
        """Connect to the engine at `path` and start to serve steps.

        Returns:
            False if the engine's shared memory cannot be reached from here; nothing was started then.
        """
        if self._is_serving:
            return True
        table = attach(segment)
        if table is None:
            return False
        end = WorkerEnd.connect(path)
        StepServer(self._worker, self._backends, end, table, partial(os._exit, 1)).start()
        self._is_serving = True
        return True

    def serve_remotely(self, slots: int, words: int) -> None:
        """Start to serve steps by `deliver` and `collect`, for an engine on another node."""
        self._remote = self._remote or RemoteSteps(self._worker, self._backends, slots, words, partial(os._exit, 1))

    def deliver(self, frame: bytes, slots: bytes, target: bytes, tokens: bytes) -> None:
        """See `RemoteSteps.deliver`."""
        assert self._remote is not None
        self._remote.deliver(frame, slots, target, tokens)

    @ray.method(concurrency_group=_ANSWERS)  # type: ignore[untyped-decorator]
    def collect(self) -> bytes:
        """See `RemoteSteps.collect`. It waits, so it has a thread of its own."""
        assert self._remote is not None
        return self._remote.collect()
