"""MaskActor: the Ray actor that a mask worker runs in. A step goes through Ray only to an actor on another node."""

from __future__ import annotations

import logging
import os
import platform
import sys
from functools import partial

import ray

from actors.processes import ActorLocation, enter_session, limit_memory, memory_limit, package_version
from actors.protocol import SegmentName, attach, connect
from actors.remote import RemoteSteps
from actors.server import StepServer
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.process_memory import FreeMemory
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

_SWITCH_SECONDS = 0.00005
"""Python's default, 5 ms, is what the second thread would wait for each time that a library returns to Python."""
ANSWERS = "answers"
"""The concurrency group of the call that waits for masks: it has a thread of its own."""


class MaskActor:
    """Runs one `MaskWorker`.

    Args:
        memory: limit of this process's memory in bytes.
        forced_tokens: look ahead for tokens without an alternative.
    """

    def __init__(self, vocabulary: Vocabulary, memory: int, forced_tokens: bool) -> None:
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
        self._forced_tokens = forced_tokens
        self._remote: RemoteSteps | None = None
        FreeMemory().watch()

    def location(self) -> ActorLocation:
        """Return where this actor runs; also shows that it is alive."""
        return ActorLocation(
            os.getpid(), str(ray.get_runtime_context().get_node_id()), platform.node(), package_version()
        )

    def attach(self, path: str, segment: SegmentName) -> bool:
        """Connect to the engine at `path` and start to serve steps.

        Returns:
            False if the engine's shared memory cannot be reached from here; nothing was started then.
        """
        table = attach(segment)
        if table is None:
            return False
        end = connect(path)
        StepServer(self._worker, self._backends, end, table, self._forced_tokens, partial(os._exit, 1)).start()
        return True

    def serve_remotely(self, slots: int, words: int) -> None:
        """Start to serve steps by `deliver` and `collect`, for an engine on another node."""
        give_up = partial(os._exit, 1)
        self._remote = RemoteSteps(self._worker, self._backends, slots, words, self._forced_tokens, give_up)

    def deliver(self, frame: bytes, slots: bytes, target: bytes, tokens: bytes) -> None:
        """See `RemoteSteps.deliver`."""
        assert self._remote is not None
        self._remote.deliver(frame, slots, target, tokens)

    @ray.method(concurrency_group=ANSWERS)  # type: ignore[untyped-decorator]
    def collect(self) -> bytes:
        """See `RemoteSteps.collect`."""
        assert self._remote is not None
        return self._remote.collect()
