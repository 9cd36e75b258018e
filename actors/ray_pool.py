"""RayPool: mask workers in Ray actors, at in-process speed.

Ray places, starts and ends the actors, and transfers the vocabulary. A step is one message per actor over a socket. The
token bitmasks are in shared memory. Grammars are compiled in processes beside the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.cluster import Cluster
from actors.compile.grammars import Grammars
from actors.processes import memory_limit
from actors.steps.dispatcher import Dispatcher, GrammarsUnused
from actors.supervision.supervisor import IncarnationSettings, Supervisor
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError, PoolUnavailable
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import Grammar, PoolStatus, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

_OTHERS_SECONDS = 10.0
"""Maximum time to wait for the other actors once one is up. Ray may have to wait for CPUs."""
_TICK_SECONDS = 0.05
_STOP_SECONDS = 20.0
"""Maximum time to wait for all actors together to end. An actor that still runs then ends with this process."""
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
            self._grammars = Grammars(vocabulary, options, lambda keys: self._dispatcher.announce(GrammarsUnused(keys)))
            undo.callback(self._grammars.close)
            self._cluster = Cluster.join(options.address)
            undo.callback(self._cluster.leave)
            self._cluster.check_room(options)
            undo.callback(self._dispatcher.close)
            settings = IncarnationSettings(
                cluster=self._cluster,
                vocabulary=vocabulary,
                memory=memory_limit(options.actor_memory_bytes),
                words=words(vocabulary.padded_vocab_size),
                options=options,
            )
            undo.callback(self._stop_actors)
            self._start_actors(settings)
            self._undo = undo.pop_all()
        self._at_exit = weakref.WeakMethod(self.shutdown)
        atexit.register(_shut_down, self._at_exit)

    def _start_actors(self, settings: IncarnationSettings) -> None:
        """Start the actors. One that is up is enough to begin; the others then have some seconds more."""
        for index in range(settings.options.actors):
            self._supervisors.append(Supervisor(index, settings, self._dispatcher.announce))
        errors: list[PoolUnavailable] = []
        starting, deadline = list(self._supervisors), math.inf
        while starting and time.monotonic() < deadline:
            for supervisor in list(starting):
                try:
                    if not supervisor.wait_started(_TICK_SECONDS):
                        continue
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
                except PoolUnavailable as error:
                    errors.append(error)
                starting.remove(supervisor)
        if deadline == math.inf:
            raise errors[0]
        for supervisor in starting:
            _log.warning("mask actor %d is not up yet: the pool begins without it", supervisor.index)

    def _stop_actors(self) -> None:
        for supervisor in self._supervisors:
            supervisor.stop()
        deadline = time.monotonic() + _STOP_SECONDS
        for supervisor in self._supervisors:
            supervisor.join(max(0.0, deadline - time.monotonic()))

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        return self._grammars.compile(constraint, backends)

    def release(self, grammar: Grammar) -> None:
        self._grammars.release(grammar)

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
            compiling=self._grammars.compiling,
            backends=self._grammars.backends(),
            trouble=self._cluster.trouble,
            ray_address=self._cluster.head,
            replays=self._dispatcher.replays,
        )

    def placement(self) -> dict[int, set[int]]:
        """Return the ids of the open sequences of each actor, by the actor's pid. From the engine's thread."""
        with self._lock:
            return self._dispatcher.placement()

    def compile_pids(self) -> list[int]:
        """Return the pids of the compile processes."""
        return self._grammars.compile_pids()

    def shutdown(self) -> None:
        """End the actors and release all processes, sockets, memory and files. Idempotent. From any thread."""
        self._dispatcher.interrupt()
        with self._lock:
            self._undo.close()


def _shut_down(pool: weakref.WeakMethod[Callable[[], None]]) -> None:
    shutdown = pool()
    if shutdown is not None:
        shutdown()
