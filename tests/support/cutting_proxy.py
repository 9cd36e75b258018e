"""A proxy on the connection between an engine and an actor. It forwards bytes, and cuts the connection at any byte."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

from actors.channel import Address

Way = Literal["requests", "answers"]
_POLL_SECONDS = 0.02


class CuttingProxy:
    """Stands between an actor, which connects to `address` of this object, and a channel.

    Args:
        channel: where the channel waits for its actor.
        directory: for the socket, if the channel is local.
        piece: maximum number of bytes that are forwarded at once.
    """

    def __init__(self, channel: Address, directory: Path, piece: int = 1 << 16) -> None:
        self._onward = channel.endpoint.removeprefix("unix://")
        self._is_local = self._onward != channel.endpoint
        self._listener = socket.socket(socket.AF_UNIX if self._is_local else socket.AF_INET)
        self._listener.bind(str(directory / "proxy") if self._is_local else ("127.0.0.1", 0))
        self._listener.listen()
        place = self._listener.getsockname()
        self.address = replace(
            channel, endpoint=f"unix://{place}" if self._is_local else f"tcp://{place[0]}:{place[1]}"
        )
        self._piece = piece
        self._left: dict[Way, int] = {}
        """Bytes until the cut."""
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="cutting-proxy", daemon=True)
        self._thread.start()

    def cut_after(self, number: int, way: Way) -> None:
        """Cut the connection after so many more bytes in one direction."""
        self._left[way] = number

    def close(self) -> None:
        """Cut the connection now. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # one side is gone: the other side's connection is closed too
            while not self._stopping.is_set() and 0 not in self._left.values():
                for key, _ in self._selector.select(_POLL_SECONDS):
                    if key.data is None:
                        self._accept()
                    elif not self._forward(key.fileobj, *key.data):  # type: ignore[arg-type]
                        self._stopping.set()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        actor, _ = self._listener.accept()
        engine = socket.socket(self._listener.family)
        if self._is_local:
            engine.connect(self._onward)
        else:
            host, _, port = self._onward.removeprefix("tcp://").rpartition(":")
            engine.connect((host, int(port)))
        self._selector.register(actor, selectors.EVENT_READ, (engine, "answers"))
        self._selector.register(engine, selectors.EVENT_READ, (actor, "requests"))

    def _forward(self, source: socket.socket, target: socket.socket, way: Way) -> bool:
        """Forward what has arrived. Returns whether the connection goes on."""
        left = self._left.get(way)
        data = source.recv(self._piece if left is None else min(left, self._piece))
        if data:
            target.sendall(data)
        if left is not None:
            self._left[way] = left - len(data)
        return bool(data)
