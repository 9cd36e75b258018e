"""RayPool: mask workers in Ray actors, at in-process speed.

Ray places, starts and ends the actors, and transfers the vocabulary. A step is one message per actor over a socket. The
token bitmasks are in shared memory. Grammars are compiled in processes beside the engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import replace
from functools import partial
from typing import Any

from actors.cluster import Cluster
from actors.compiler import Compiler
from actors.dispatcher import Dispatcher, unload
from actors.processes import CALL_SECONDS, STOP_SECONDS
from actors.supervisor import Supervisor
from guided.constraint import Constraint
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import Grammar, PoolStatus
from guided.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class RayPool(Dispatcher):
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
        super().__init__(options.pool_wait, options.max_replays, options.forced_tokens)
        self._vocabulary = vocabulary
        self._supervisors: list[Supervisor] = []
        with contextlib.ExitStack() as undo:
            # Its processes take seconds to warm up, so they start before Ray.
            self._compiler = Compiler(vocabulary, options, self._unload)
            undo.callback(self._compiler.close)
            self._cluster = Cluster.join(options.address)
            undo.callback(self._cluster.leave)
            self._cluster.check_room(options)
            undo.callback(self.close)
            undo.callback(self._stop_actors)
            for index in range(options.actors):
                self._supervisors.append(Supervisor(index, self._cluster, vocabulary, options, self))
            self._wait_started()
            self._undo = undo.pop_all()

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
        if keys:
            self.announce(partial(unload, self.workers, keys))

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        return self._compiler.compile(constraint, backends)

    def release(self, grammar: Grammar) -> None:
        self._compiler.release(grammar)

    def status(self) -> PoolStatus:
        return PoolStatus(
            name="ray",
            workers=[supervisor.status() for supervisor in self._supervisors],
            compiling=self._compiler.compiling,
            backends=self._compiler.backends(),
            trouble=self._cluster.trouble,
            replays=self.replays,
        )

    def shutdown(self) -> None:
        """End the actors and release all processes, sockets, memory and files. Idempotent.

        Without it, they end when this process does.
        """
        self._undo.close()
