"""RayPool: mask workers in Ray actors, at in-process speed.

Ray places, starts and ends the actors, and transfers the vocabulary. A step is one message per actor over a socket. The
token bitmasks are in shared memory. Grammars are compiled in processes beside the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.cluster import Cluster
from actors.compiler import Compiler
from actors.dispatcher import Dispatcher, unload
from actors.processes import CALL_SECONDS, STOP_SECONDS
from actors.supervisor import Supervisor
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import Grammar, PoolStatus, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class RayPool:
    """A `MaskPool` of Ray actors. Ready to use when it is constructed.

    Args:
        vocabulary: the vocabulary of the masks.
        options: None is `RayPoolOptions()`.
        changes: fields of `RayPoolOptions` that replace those of `options`.

    Raises:
        PoolUnavailable: Ray can't be reached or started, or an actor didn't start; says why.
    """

    def __init__(self, vocabulary: Vocabulary, options: RayPoolOptions | None = None, **changes: Any) -> None:
        options = replace(options or RayPoolOptions(), **changes)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._dispatcher = Dispatcher(options.pool_wait, options.max_replays, options.forced_tokens)
        self._supervisors: list[Supervisor] = []
        with contextlib.ExitStack() as undo:
            # Its processes take seconds to warm up, so they start before Ray.
            self._compiler = Compiler(vocabulary, options, self._unload)
            undo.callback(self._compiler.close)
            self._cluster = Cluster.join(options.address)
            undo.callback(self._cluster.leave)
            self._cluster.check_room(options)
            undo.callback(self._dispatcher.close)
            undo.callback(self._stop_actors)
            for index in range(options.actors):
                self._supervisors.append(Supervisor(index, self._cluster, vocabulary, options, self._dispatcher))
            self._wait_started()
            self._undo = undo.pop_all()
        self._at_exit = weakref.WeakMethod(self.shutdown)
        atexit.register(_shut_down, self._at_exit)

    def _wait_started(self) -> None:
        """Wait for the first actor that is up, and some seconds for the others: Ray may have to wait for CPUs."""
        starting = {supervisor.started: supervisor for supervisor in self._supervisors}
        if all(started.exception() is not None for started in as_completed(starting)):
            self._supervisors[0].started.result()
        for started in wait(starting, CALL_SECONDS).not_done:
            _log.warning("mask actor %d is not up yet: the pool begins without it", starting[started].index)

    def _stop_actors(self) -> None:
        """End the actors. One that still runs after some seconds ends with this process."""
        for supervisor in self._supervisors:
            supervisor.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for supervisor in self._supervisors:
            supervisor.join(max(0.0, deadline - time.monotonic()))

    def _unload(self, keys: Collection[str]) -> None:
        self._dispatcher.announce(partial(unload, self._dispatcher.workers, keys))

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        return self._compiler.compile(constraint, backends)

    def release(self, grammar: Grammar) -> None:
        self._compiler.release(grammar)

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        with self._lock:
            self._dispatcher.open(sequence, grammar)

    def free(self, sequence_ids: Collection[int]) -> None:
        with self._lock:
            self._dispatcher.free(sequence_ids)

    def rollback(self, sequence_id: int, length: int) -> None:
        with self._lock:
            self._dispatcher.rollback(sequence_id, length)

    def submit(self, sequences: Sequence[GuidedSequence], new_tokens: NDArray[np.int32] | None = None) -> None:
        with self._lock:
            self._dispatcher.submit(sequences, new_tokens)

    def collect(self, deadline: float | None = None) -> StepMasks:
        with self._lock:
            return self._dispatcher.collect(deadline)

    def decided(self) -> list[int]:
        with self._lock:
            return self._dispatcher.decided()

    def failures(self) -> dict[int, GuidedError]:
        with self._lock:
            return self._dispatcher.failures()

    def status(self) -> PoolStatus:
        workers = [supervisor.status() for supervisor in self._supervisors]
        return PoolStatus(
            name="ray",
            workers=workers,
            compiling=self._compiler.compiling,
            backends=self._compiler.backends(),
            trouble=self._cluster.trouble,
            ray_address=self._cluster.head,
            replays=self._dispatcher.replays,
        )

    def placement(self) -> dict[int, set[int]]:
        """Return the ids of the open sequences of each actor, by the actor's pid. From the engine's thread."""
        with self._lock:
            return self._dispatcher.placement()

    def shutdown(self) -> None:
        """End the actors and release all processes, sockets, memory and files. Idempotent. From any thread."""
        self._dispatcher.interrupt()
        with self._lock:
            self._undo.close()


def _shut_down(pool: weakref.WeakMethod[Callable[[], None]]) -> None:
    shutdown = pool()
    if shutdown is not None:
        shutdown()
