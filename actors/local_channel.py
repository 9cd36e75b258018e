"""The step channel between processes of one machine: a Unix socket that the engine's thread writes to itself.

ZeroMQ would hand each message to a thread of its own, and that thread to one of the actor's: every wake-up on the way
costs tens of microseconds, and may take the CPU from the thread that has just sent. (`python -m benchmarks.channel`
has both.) What it asks of ZeroMQ holds here: an endpoint for each incarnation, never connected to twice; sends that
never block; the end of the other side noticed at once.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
import time

from actors.address import Address

__all__ = ["LocalChannel", "LocalEnd"]

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_SCHEME = "unix://"
_CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): process, user, group."""
_SEND_SECONDS = struct.pack("ll", 5, 0)


class _Frames:
    """Messages out of a stream of bytes, each after its length."""

    def __init__(self, stream: sockets.socket) -> None:
        self._stream = stream
        self._bytes = bytearray()

    def next(self) -> bytes | None:
        """The next whole message that has come; None where there is none."""
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
        """Take what has come; False at the end. Raises `BlockingIOError` where nothing has, and it isn't waited for."""
        chunk = self._stream.recv(_CHUNK, flags)
        self._bytes += chunk
        return bool(chunk)


class LocalChannel:
    """Engine side. Made on one thread, then handed to the one that sends and receives; see `Channel`.

    Args:
        path: of the socket; in a directory that nobody else can enter.
    """

    def __init__(self, path: str) -> None:
        self.address = Address(_SCHEME + path)
        self._path = path
        self._listening = sockets.socket(sockets.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(2)
        self._stream, self._lifeline = sockets.socket(sockets.AF_UNIX), sockets.socket(sockets.AF_UNIX)
        self._frames = _Frames(self._stream)
        self._unsent = b""
        self._lost = False

    def wait_connected(self, timeout: float) -> bool:
        """Whether the actor connected within `timeout` seconds. Nobody else can after it."""
        deadline = time.monotonic() + timeout
        try:
            connections = [self._accept(deadline) for _ in range(2)]
        except TimeoutError:
            return False
        finally:
            self._stop_listening()
        for old, new in zip((self._stream, self._lifeline), connections, strict=True):
            old.close()
            new.setblocking(False)
        self._stream, self._lifeline = connections
        self._frames = _Frames(self._stream)
        return True

    def _accept(self, deadline: float) -> sockets.socket:
        while True:
            self._listening.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
            connection, _ = self._listening.accept()
            packed = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(packed)[1] == os.getuid():
                return connection
            connection.close()

    @property
    def socket(self) -> int:
        """To poll for answers: a file descriptor."""
        return self._stream.fileno()

    @property
    def monitor(self) -> int:
        """To poll for the end: a file descriptor."""
        return self._lifeline.fileno()

    def is_disconnected(self) -> bool:
        """Whether the connection was lost: nothing is ever sent through the second one."""
        try:
            return not self._lifeline.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: bytes) -> bool:
        """Send without blocking; False where the peer is gone or doesn't read."""
        self.push()
        if self._unsent or self._lost:
            return False
        data = _LENGTH.pack(len(message)) + message
        sent = self._write(data)
        self._unsent = data[sent:] if sent else b""
        return sent > 0

    def push(self) -> None:
        """Send what is left of a message that was too large for the connection."""
        if self._unsent:
            self._unsent = self._unsent[self._write(self._unsent) :]

    def _write(self, data: bytes) -> int:
        try:
            return self._stream.send(data, sockets.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self._lost = True
            return 0

    def receive(self) -> bytes | None:
        """The next message that is there; None where there is none."""
        while (message := self._frames.next()) is None:
            try:
                if not self._frames.read():
                    return None
            except OSError:  # nothing has come, or it is lost
                return None
        return message

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._stop_listening()
        self._stream.close()
        self._lifeline.close()
        self._lost = True

    def _stop_listening(self) -> None:
        self._listening.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class LocalEnd:
    """Actor side of a `LocalChannel`. Never reconnects."""

    def __init__(self, address: Address) -> None:
        self._socket, self._lifeline = (_connected(address.endpoint.removeprefix(_SCHEME)) for _ in range(2))
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, _SEND_SECONDS)
        self._frames = _Frames(self._socket)

    @staticmethod
    def serves(address: Address) -> bool:
        """Whether the address is a `LocalChannel`'s."""
        return address.endpoint.startswith(_SCHEME)

    def fileno(self) -> int:
        """To poll for messages."""
        return self._socket.fileno()

    def waiting(self) -> bytes | None:
        """The next message, where it has come with the last one."""
        return self._frames.next()

    def recv(self) -> bytes:
        """Wait for the next message.

        Raises:
            ConnectionError: the engine is gone, or has closed the channel.
        """
        while (message := self._frames.next()) is None:
            if not self._frames.read():
                raise ConnectionResetError("the engine closed the channel")
        return message

    def send(self, message: bytes) -> None:
        """Raises `OSError` where the engine doesn't read for seconds, or is gone."""
        self._socket.sendall(_LENGTH.pack(len(message)) + message, sockets.MSG_NOSIGNAL)

    def close(self) -> None:
        """End it, and whoever waits in `recv`."""
        for each in (self._socket, self._lifeline):
            with contextlib.suppress(OSError):
                each.shutdown(sockets.SHUT_RDWR)
            each.close()


def _connected(path: str) -> sockets.socket:
    connection = sockets.socket(sockets.AF_UNIX)
    connection.connect(path)
    return connection
