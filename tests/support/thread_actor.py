"""A mask actor on a thread: real channel, segment and step loop, no Ray, no process. Death is a lost connection."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count

import zmq
from byte_vocabulary import BYTES, WORDS

from actors.channel import Channel, Transport, connect
from actors.link import Link, Wired
from actors.local_channel import LocalEnd
from actors.segment import Rows, Segment, attach
from actors.step_loop import StepLoop
from actors.supervision.process import ActorLocation
from guided.backends.base import CompiledGrammar
from guided.worker import MaskWorker

_incarnations = count(1)


class Wire:
    """Both ends of a connection, and the memory between them."""

    def __init__(self, transport: Transport, *, rows: int = 8, shared: bool = True, index: int = 0) -> None:
        self.incarnation = next(_incarnations)
        self.segment = Segment(rows, WORDS)
        self.channel: Channel = transport.ipc() if shared else transport.tcp()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = connect(self.context, self.channel.address)
        assert self.channel.wait_connected(10)
        self.installed: set[str] = set()
        place = ActorLocation(os.getpid(), "node", "host")
        self.link = Link(Wired(index, self.incarnation, place, self.channel, self.segment, shared, self.installed))

    def close(self) -> None:
        """The actor's end goes away."""
        self.socket.close()
        self.context.term()


class ThreadActor:
    """A worker with grammars, served by a `StepLoop`, for as long as the test runs."""

    def __init__(
        self,
        transport: Transport,
        grammars: Mapping[str, CompiledGrammar],
        *,
        rows: int = 8,
        shared: bool = True,
        index: int = 0,
    ) -> None:
        self.wire = Wire(transport, rows=rows, shared=shared, index=index)
        self.link = self.wire.link
        self.worker = MaskWorker(BYTES)
        for key, grammar in grammars.items():
            self.worker.install(key, grammar)
            self.wire.installed.add(key)
        mapped = attach(self.wire.segment.name) if shared else Rows.private(rows, WORDS)
        assert mapped is not None
        self.rows = mapped
        StepLoop(self.wire.incarnation, self.worker, self.wire.socket, mapped, shared, self._give_up).start()
        _living.append(self)

    def close(self) -> None:
        """End the loop; it must not be in a mask."""
        if isinstance(self.wire.socket, LocalEnd):
            self.wire.socket.close()
        self.wire.context.term()

    def _give_up(self) -> None:
        self.wire.socket.close()


def close_all() -> None:
    """End the actors that a test left."""
    while _living:
        _living.pop().close()


_living: list[ThreadActor] = []
