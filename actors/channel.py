"""The step channel: a Unix socket between the engine and one worker, used by one incarnation only. Sends never block.

The engine's thread itself writes to the socket. A library that hands messages to a thread of its own, as ZeroMQ does,
costs a wake-up of tens of microseconds per message, and that thread may take the CPU from the engine's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_SEND_TIMEOUT = struct.pack("ll", 5, 0)


class _Frames:
    """Splits a stream of bytes into messages, each after its length."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._bytes = bytearray()

    def next(self) -> bytes | None:
        """Return the next complete message, or None."""
        have = len(self._bytes)
        if have < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if have < end:
            return None
        message = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message

    def read(self, flags: int = 0) -> bool:
        """Read what has arrived; return False at the end. Raises `BlockingIOError` on a non-blocking empty stream."""
        chunk = self._stream.recv(_CHUNK, flags)
        self._bytes += chunk
        return bool(chunk)


class Channel:
    """The engine's end. Used by one thread at a time; another one may poll `fd` for the end of the connection."""

    def __init__(self) -> None:
        self.path = f"\0guided-{os.getpid()}-{secrets.token_hex(8)}"
        """Where the worker connects to: an abstract address (unix(7)), which leaves no file."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(1)
        self._stream = socket.socket(socket.AF_UNIX)
        self._frames = _Frames(self._stream)
        self._unsent = b""

    def accept(self, timeout: float) -> bool:
        """Return whether the worker connected within `timeout` seconds. Nothing can connect after this."""
        self._listening.settimeout(timeout)
        try:
            connected, _ = self._listening.accept()
            if _user_of(connected) != os.getuid():  # other users can see the address
                connected.close()
                return False
        except TimeoutError:
            return False
        finally:
            self._listening.close()
        self._stream.close()
        self._stream, self._frames = connected, _Frames(connected)
        connected.setblocking(False)
        return True

    @property
    def fd(self) -> int:
        """The descriptor to poll: readable if there is a message; `POLLHUP` once the worker's end is closed."""
        return self._stream.fileno()

    def send(self, message: bytes) -> None:
        """Queue a message, and send what the socket takes now. A lost connection is noticed by its supervisor."""
        self._unsent += _LENGTH.pack(len(message)) + message
        self.push()

    def push(self) -> None:
        """Send what is left of the queue."""
        if self._unsent:
            with contextlib.suppress(OSError):  # the socket's buffer is full, or the connection is lost
                self._unsent = self._unsent[self._stream.send(self._unsent, socket.MSG_NOSIGNAL) :]

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""
        while (message := self._frames.next()) is None:
            try:
                if not self._frames.read():
                    return None
            except OSError:  # nothing has arrived, or the connection is lost
                return None
        return message

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._listening.close()
        self._stream.close()
        self._unsent = b""


def _user_of(stream: socket.socket) -> int:
    """Return the user id of the process at the other end (SO_PEERCRED)."""
    _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


class WorkerEnd:
    """The worker's end. It never reconnects: a lost connection ends the incarnation.

    Args:
        stream: a connected stream socket.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._frames = _Frames(stream)

    @classmethod
    def connect(cls, path: str) -> WorkerEnd:
        """Connect to `Channel.path`."""
        with contextlib.ExitStack() as undo:
            stream = undo.enter_context(socket.socket(socket.AF_UNIX))
            stream.connect(path)
            undo.pop_all()
        return cls(stream)

    def receive(self, *, wait: bool = True) -> bytes | None:
        """Return the next message. If there is none: wait for it, or return None.

        Raises:
            ConnectionError: the connection is lost.
        """
        try:
            while (message := self._frames.next()) is None:
                if not self._frames.read(0 if wait else socket.MSG_DONTWAIT):
                    raise ConnectionResetError("the engine closed the channel")
        except BlockingIOError:
            return None
        return message

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, at most `seconds`."""
        select.select([self._stream], [], [], seconds)

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the engine does not read, or is gone.
        """
        self._stream.sendall(_LENGTH.pack(len(message)) + message, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the connection, which ends a `receive` that waits."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()
