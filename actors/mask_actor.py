"""MaskActor: the Ray actor that a mask worker runs in, and the step path to an actor on
another node.

For the engine each worker is local. `RemoteSteps`, in an actor on another node, has a
slot table of its own for the same `StepServer`. `forward`, in the driver's process on
the engine's node, is the worker's side of the engine's table and channel. It makes
three kinds of Ray calls: `deliver` hands over a frame of requests, `load` a grammar in
the object store, and `collect` waits for lines of the table that have changed. They are
separate, so that a slow row does not delay frames.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.packages import buffer, receive, receive_grammar, send_package, socket_pair
from actors.processes import enter_session, limit_memory, memory_limit
from actors.protocol import (
    WAKE,
    Indices,
    Int32s,
    Int64s,
    SlotTable,
    connect,
    create_table,
    hang_up,
)
from actors.server import ReceiveGrammar, StepServer
from guided.backends import Backends
from guided.backends.without_torch import leave_out_torch
from guided.masks.resources import watch_free_memory
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

_TOGETHER_SECONDS = 0.003
"""Lines that are ready wait so long for the other ones, and are sent without them after
that."""
_REPORT_SECONDS = 0.25
"""While lines are missing, the engine hears this often which of them is being
filled."""
_IDLE_REPORT_SECONDS = 0.5
"""Otherwise it gets the heartbeat this often."""
ANSWERS = "answers"
"""The concurrency group of `collect`, which waits for masks: it has a thread of its
own."""
_log = logging.getLogger(__name__)


class ActorLocation(NamedTuple):
    """Where an actor runs, and which version of this package it has."""

    pid: int
    node_id: str
    """Ray's id of the node."""
    host: str
    version: str
    is_direct: bool
    """Whether it is on the engine's node, and not in another container."""


class Lines(NamedTuple):
    """Lines of a slot table that have changed."""

    slots: Indices
    """`[n]`."""
    columns: dict[str, NDArray[Any]]
    """`[n, ...]`: what the worker has written. `ready` is the last."""
    mark: NDArray[np.void]
    """The worker's mark."""
    failures: list[bytes]
    """Frames with a `Failed` each."""


class RemoteSteps:
    """Serves the steps of an engine on another node."""

    def begin(
        self,
        slots: int,
        words: int,
        serve: Callable[[socket.socket, ReceiveGrammar, SlotTable], None],
        fetch: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Begin to serve.

        Args:
            serve: starts a `StepServer` with its end of a channel, its
                `receive_grammar`, and its table.
            fetch: waits for the objects of references (`ray.get`).
        """
        self._table, memory = create_table(slots, words)
        memory.close()
        self._sent_ready = self._table.ready.copy()
        self._sent_status = self._table.status.copy()
        self._news = threading.Event()
        """Set while there may be lines to wait for."""
        self._grammars = queue.SimpleQueue[list[Any]]()
        self._end, server_end = socket_pair()

        def receive_grammar() -> Callable[[], Any]:
            reference = self._grammars.get()
            return lambda: fetch(reference)[0]

        serve(server_end, receive_grammar, self._table)

    def load(self, reference: list[Any]) -> None:
        """Take over a grammar: the one reference of an encoded `CompileResult` in the
        object store. In order."""
        self._grammars.put(reference)

    def deliver(
        self, frame: bytes, slots: Indices, target: Int64s, tokens: Int32s
    ) -> None:
        """Take over a frame of requests, and the new values `[n]` of the engine's
        columns. Calls are made in order."""
        self._table.tokens[slots] = tokens
        self._table.target[slots] = target
        self._news.set()
        send_package(self._end, frame)

    def collect(self) -> Lines:
        """Wait for changed lines. Those that are ready wait a few milliseconds for the
        others of their step."""
        table = self._table
        failures: list[bytes] = []
        self._news.wait(_IDLE_REPORT_SECONDS)
        deadline = time.monotonic() + _REPORT_SECONDS
        while True:
            self._news.clear()
            table.wake[0] = (
                1  # the server sends a message when it has nothing left to fill
            )
            has_work = table.has_work()
            # After `has_work`: rows are filled meanwhile.
            changed = (table.ready != self._sent_ready) | (
                table.status != self._sent_status
            )
            while wait([self._end], 0):
                frame = bytes(receive(self._end))
                if frame != WAKE:
                    failures.append(frame)
            now = time.monotonic()
            if changed.any():
                deadline = min(deadline, now + _TOGETHER_SECONDS)
            if not has_work or now >= deadline:
                break
            wait([self._end], min(deadline - now, _TOGETHER_SECONDS))
        if has_work:
            self._news.set()
        return self._lines(np.flatnonzero(changed), failures)

    def _lines(self, slots: Indices, failures: list[bytes]) -> Lines:
        table = self._table
        # before the others: a line that is filled again meanwhile has the older version
        ready = table.ready[slots]
        columns = {
            name: getattr(table, name)[slots]
            for name in ("mask", "seconds", "status", "forced", "veto")
        }
        self._sent_ready[slots] = ready
        self._sent_status[slots] = columns["status"]
        return Lines(slots, {**columns, "ready": ready}, table.mark.copy(), failures)


class MaskActor(RemoteSteps):
    """Runs one `MaskWorker`.

    Args:
        memory: limit of this process's memory in bytes.
        forced_tokens: look ahead for tokens without an alternative.
        backends: grammar libraries that are imported now. Others are when a grammar
            first needs them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        memory: int,
        forced_tokens: bool,
        backends: Sequence[str],
    ) -> None:
        # this node may have less memory than the engine's
        limit_memory(memory_limit(memory))
        leave_out_torch()
        # to Ray's file of this process
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        # Python's default, 5 ms, is what the second thread would wait for each time
        # that a library returns to Python.
        sys.setswitchinterval(0.00005)
        self._backends = Backends(vocabulary)
        for name in backends:
            try:
                self._backends[name]
            except Exception:  # its grammars will get the error
                _log.exception("the grammar library of %s cannot be imported", name)
        self._worker = MaskWorker(vocabulary)
        self._forced_tokens = forced_tokens
        # now, because the engine waits while an actor loads its libraries
        enter_session()
        watch_free_memory()

    def serve(self, channel: str, slots: int, words: int) -> ActorLocation:
        """Serve the steps of an engine: by its channel, or by `deliver` and `collect`
        if it cannot be reached.

        Returns where this actor runs.
        """
        import ray  # the engine's process, which reads this class, never loads it

        is_direct = True
        try:
            end, grammars, table = connect(channel, slots, words)
        except ConnectionRefusedError:
            is_direct = False
            self.begin(slots, words, self._serve, ray.get)
        else:
            self._serve(end, lambda: partial(buffer, receive_grammar(grammars)), table)
        node_id = str(ray.get_runtime_context().get_node_id())
        return ActorLocation(
            os.getpid(), node_id, platform.node(), version("guided"), is_direct
        )

    def _serve(
        self, end: socket.socket, receive_grammar: ReceiveGrammar, table: SlotTable
    ) -> None:
        give_up = partial(os._exit, 1)
        StepServer(
            self._worker,
            self._backends,
            end,
            receive_grammar,
            table,
            self._forced_tokens,
            give_up,
        ).start()


def forward(
    end: socket.socket,
    grammars: socket.socket,
    table: SlotTable,
    deliver: Callable[[bytes, Indices, Int64s, Int32s], object],
    load: Callable[[Any], object],
    collect: Callable[[], Lines],
) -> None:
    """Forward one incarnation's steps, on three daemon threads, until the engine closes
    the channel or the actor ends.

    Args:
        end, grammars, table: the worker's ends of the engine's channel, and the
            engine's table.
        deliver: calls `RemoteSteps.deliver` in the actor, and does not wait for it.
            Calls keep their order.
        load: puts a buffer into the object store, and calls `RemoteSteps.load` in the
            actor.
        collect: calls `RemoteSteps.collect` in the actor. Raises if the actor has
            ended.
    """

    sent = table.target.copy()

    def forward_frame() -> None:
        frame = bytes(receive(end))
        # each request of a mask has another version
        slots = np.flatnonzero(table.target != sent)
        sent[slots] = target = table.target[slots]
        deliver(frame, slots, target, table.tokens[slots])

    def return_lines() -> None:
        lines = collect()
        _write(lines, table)
        for failed in lines.failures:
            send_package(end, failed)
        if table.wake[0]:
            table.wake[0] = 0
            send_package(end, WAKE)

    def run(action: Callable[[], object]) -> None:
        try:
            while True:
                action()
        except Exception as error:  # of any kind: the engine would wait for a worker that does not answer
            _log.info("a step channel ends: %s", error)
        hang_up(end)

    for action in (
        forward_frame,
        lambda: load(buffer(receive_grammar(grammars))),
        return_lines,
    ):
        threading.Thread(
            target=run, args=(action,), name="forwarder", daemon=True
        ).start()


def _write(lines: Lines, table: SlotTable) -> None:
    """Write lines into the table. The engine reads a line when its `ready`, which is
    written last, has changed."""
    for name, values in lines.columns.items():
        getattr(table, name)[lines.slots] = values
    table.mark[:] = lines.mark
