"""Length-prefixed frames over a pipe, read with a deadline: how an actor talks to the process it may have to kill."""

from __future__ import annotations

import os
import select
import struct
import time

__all__ = ["read_frame", "readable", "write_frame"]

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20


def write_frame(fd: int, data: bytes) -> None:
    """Write one frame. Raises `BrokenPipeError` where nobody reads any more."""
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view[:_CHUNK]) :]


def read_frame(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame.

    Args:
        deadline: `time.monotonic()` until which to wait; None waits for ever.

    Raises:
        TimeoutError: it didn't come in time.
        EOFError: the other end is closed.
    """
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    return _read(fd, length, deadline)


def readable(fd: int, timeout: float) -> bool:
    """Whether there is something to read (or the end) within `timeout` seconds."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, timeout * 1000)))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    chunks: list[bytes] = []
    while count:
        if deadline is not None and not readable(fd, deadline - time.monotonic()):
            raise TimeoutError
        chunk = os.read(fd, min(count, _CHUNK))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
