"""A mask actor on a thread: real channel, slot table and step server, without Ray and without a process.

Its death is a lost connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import count

import zmq
from byte_vocabulary import BYTES, WORDS

from actors.channel import Address, Channel, Transport, WorkerEnd, connect
from actors.processes import ProcessLocation
from actors.steps.connection import WorkerConnection
from actors.steps.protocol import Segment, SlotTable, attach
from actors.steps.server import StepServer
from guided.backends.base import CompiledGrammar
from guided.worker import MaskWorker

_incarnations = count(1)


class ConnectedPair:
    """Both ends of a channel, and the slot table between them.

    Args:
        through: returns the address that the actor's end connects to, for a proxy in between.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        slots: int = 8,
        shared: bool = True,
        index: int = 0,
        through: Callable[[Address], Address] = lambda address: address,
    ) -> None:
        self.segment = Segment(slots, WORDS)
        self.channel: Channel = transport.ipc() if shared else transport.tcp()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.end = connect(self.context, through(self.channel.address))
        assert self.channel.wait_connected(10)
        self.installed: set[str] = set()
        here = ProcessLocation.here("node")
        self.connection = WorkerConnection(
            index, next(_incarnations), here, self.channel, self.segment, shared, self.installed
        )

    def close(self) -> None:
        """Close the actor's end."""
        self.end.close()
        self.context.term()


class ThreadActor:
    """A worker with grammars, served by a `StepServer` for as long as the test runs.

    Args:
        wrap: returns what the server uses as its end of the channel.
    """

    def __init__(
        self,
        transport: Transport,
        grammars: Mapping[str, CompiledGrammar],
        *,
        slots: int = 8,
        shared: bool = True,
        index: int = 0,
        through: Callable[[Address], Address] = lambda address: address,
        wrap: Callable[[WorkerEnd], WorkerEnd] = lambda end: end,
    ) -> None:
        self.pair = ConnectedPair(transport, slots=slots, shared=shared, index=index, through=through)
        self.connection = self.pair.connection
        self.worker = MaskWorker(BYTES)
        for key, grammar in grammars.items():
            self.install(key, grammar)
        table = attach(self.pair.segment.name) if shared else SlotTable.private(slots, WORDS)
        assert table is not None
        self.table = table
        self._shared = shared
        self.ended = threading.Event()
        """The server has given up: the process of a real actor ends here."""
        StepServer(self.worker, wrap(self.pair.end), table, shared, self._give_up).start()
        _living.append(self)

    def install(self, key: str, grammar: CompiledGrammar) -> None:
        self.worker.install(key, grammar)
        self.pair.installed.add(key)

    def _give_up(self) -> None:
        self.pair.end.close()
        self.ended.set()

    def close(self) -> None:
        """End the server; it must not be in a mask."""
        if self._shared:
            self.pair.end.close()
        self.pair.context.term()


def close_all() -> None:
    """End the actors that a test left."""
    while _living:
        _living.pop().close()


_living: list[ThreadActor] = []
