"""A proxy between an engine and an actor that loses, repeats, delays and garbles messages. Real sockets and bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import zmq
from actors.local_channel import LocalEnd
from actors.remote_channel import RemoteEnd
from actors.segment import Rows, attach
from actors.step_loop import StepLoop
from byte_vocabulary import BYTES
from thread_actor import Wire

from actors.channel import Transport, connect
from guided.backends.base import CompiledGrammar
from guided.worker import MaskWorker

Rule = Callable[[bytes], Sequence[bytes]]
"""Returns the messages that are sent instead of a message."""


def honest(message: bytes) -> Sequence[bytes]:
    return [message]


class ProxiedActor:
    """An actor on a thread. Its requests pass `request_rule`, and its answers pass `answer_rule`."""

    def __init__(
        self,
        transport: Transport,
        grammars: Mapping[str, CompiledGrammar],
        directory: Path,
        *,
        shared: bool = True,
        index: int = 0,
        rows: int = 8,
    ) -> None:
        self.request_rule: Rule = honest
        self.answer_rule: Rule = honest
        self.wire = Wire(transport, rows=rows, shared=shared, index=index)
        self.link = self.wire.link
        self.worker = MaskWorker(BYTES)
        for key, grammar in grammars.items():
            self.worker.install(key, grammar)
            self.wire.installed.add(key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inner = self._context.socket(zmq.PAIR)
        self._inner.linger = 0
        self._inner.sndtimeo = 0
        path = f"ipc://{directory / f'm{self.wire.incarnation}'}"
        self._inner.bind(path)
        mapped = attach(self.wire.segment.name) if shared else Rows.private(rows, self.wire.segment.name.words)
        assert mapped is not None
        address = replace(self.wire.channel.address, endpoint=path, server_key=b"", client_key=b"", client_secret=b"")
        self._socket = connect(self._context, address)
        StepLoop(self.wire.incarnation, self.worker, self._socket, mapped, shared, self._give_up).start()
        self._ended = False
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        poller = zmq.Poller()
        end = self.wire.socket  # a ZeroMQ socket can't be polled by its file descriptor alone
        poller.register(end._socket if isinstance(end, RemoteEnd) else end, zmq.POLLIN)
        poller.register(self._inner, zmq.POLLIN)
        while not self._ended:
            for socket, _ in poller.poll(20):
                requests = socket is not self._inner
                rule, to = (self.request_rule, self._inner) if requests else (self.answer_rule, self.wire.socket)
                with contextlib.suppress(zmq.Again, OSError):  # that end is closed
                    for message in self._requests() if requests else [self._inner.recv()]:
                        for each in rule(message):
                            to.send(each)

    def _requests(self) -> Iterator[bytes]:
        """Yield the next request and those that were received with it."""
        end = self.wire.socket
        yield end.recv()
        while isinstance(end, LocalEnd) and (message := end.waiting()) is not None:
            yield message

    def _give_up(self) -> None:
        self._socket.close()

    def close(self) -> None:
        """Close both ends. The actor must not be computing a mask."""
        self._ended = True
        self._thread.join(10)
        self._inner.close(linger=0)
        self._context.term()
        self.wire.close()
