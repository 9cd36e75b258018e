"""A mask actor on threads: real channel, slot table and step server, without Ray and without a process.

Its death is a lost connection.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from byte_vocabulary import BYTES, WORDS

from actors.connection import WorkerConnection
from actors.protocol import Channel, Segment, attach, connect, hang_up
from actors.server import StepServer
from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.worker import MaskWorker


class ConnectedPair:
    """Both ends of a channel, and the slot table between them."""

    def __init__(self, *, slots: int = 8, index: int = 0) -> None:
        self.segment = Segment(slots, WORDS)
        self.channel = Channel()
        self.end = connect(self.channel.path)
        assert self.channel.accept(10)
        self.connection = WorkerConnection(f"mask worker {index}", os.getpid(), self.channel, self.segment)


class ThreadActor:
    """A worker with grammars, served by a `StepServer` for as long as the test runs."""

    def __init__(self, grammars: Mapping[str, CompiledGrammar], *, slots: int = 8, index: int = 0) -> None:
        self.pair = ConnectedPair(slots=slots, index=index)
        self.connection = self.pair.connection
        self.worker = MaskWorker(BYTES)
        for key, grammar in grammars.items():
            self.worker.install(key, grammar)
            self.connection.loaded.add(key)
        table = attach(self.pair.segment.name)
        assert table is not None
        self.table = table
        self.ended = threading.Event()
        """The server has given up: the process of a real actor ends here."""
        StepServer(self.worker, Backends(BYTES), self.pair.end, table, False, self._give_up).start()
        _living.append(self)

    def _give_up(self) -> None:
        hang_up(self.pair.end)
        self.ended.set()

    def close(self) -> None:
        """End the server; it must not be in a mask."""
        hang_up(self.pair.end)


def close_all() -> None:
    """End the actors that a test left."""
    while _living:
        _living.pop().close()


_living: list[ThreadActor] = []
