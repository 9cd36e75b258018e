"""The shared-memory segment that a mask worker writes its rows into. One an incarnation, made and owned by the engine.

A memfd, opened by the actor through `/proc/<pid>/fd`: it vanishes with its owner, whoever kills that. (Python 3.11's
`multiprocessing.shared_memory` doesn't: the resource tracker of a killed actor unlinks the engine's segment.)
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["IDLE", "Rows", "Segment", "SegmentName", "attach"]

_HEADER = mmap.PAGESIZE
_NONCE_BYTES = 32
_BUSY_OFFSET = 64
IDLE = -1


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What an actor needs to find a segment, and to know that it is the right one."""

    pid: int
    fd: int
    nonce: bytes
    rows: int
    words: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The memory itself, mapped."""

    masks: NDArray[np.int32]
    """`[rows, words]`."""
    busy: NDArray[np.int32]
    """`[1]`: the row that the worker is filling, or `IDLE`. Tells whose fault it is where a worker never answers."""

    @classmethod
    def private(cls, rows: int, words: int) -> Rows:
        """Memory that nobody else sees."""
        return cls(np.empty((rows, words), np.int32), np.full(1, IDLE, np.int32))


class Segment:
    """Engine side: `rows`, int32 `[rows, words]`, plus a page that holds a nonce and the row that is being filled.

    Memory is taken as rows are first written; reserving many costs nothing.
    """

    def __init__(self, rows: int, words: int) -> None:
        size = _HEADER + rows * words * 4
        self._fd = os.memfd_create("guided-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        # Nobody can shrink it under the engine's feet: that would be a SIGBUS there.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, size)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._map[:_NONCE_BYTES] = nonce
        mapped = _rows(self._map, rows, words)
        self.rows, self.busy = mapped.masks, mapped.busy
        self.busy[0] = IDLE
        self.name = SegmentName(os.getpid(), self._fd, nonce, rows, words)

    def close(self) -> None:
        """Drop it; a worker that still has it mapped writes where nobody reads any more. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        empty = Rows.private(0, self.rows.shape[1])
        self.rows, self.busy = empty.masks, empty.busy
        with contextlib.suppress(BufferError):  # a view is still alive somewhere: it unmaps when that is gone
            self._map.close()


def attach(name: SegmentName) -> Rows | None:
    """Actor side: the rows; None where this process can't reach that memory.

    The same pid and descriptor may exist on another machine: only the nonce proves that it is the same segment.
    """
    try:
        fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = _HEADER + name.rows * name.words * 4
        if os.fstat(fd).st_size != size:
            return None
        mapped = mmap.mmap(fd, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return _rows(mapped, name.rows, name.words) if mapped[:_NONCE_BYTES] == name.nonce else None


def _rows(mapped: mmap.mmap, rows: int, words: int) -> Rows:
    masks = np.frombuffer(mapped, np.int32, rows * words, offset=_HEADER).reshape(rows, words)
    return Rows(masks, np.frombuffer(mapped, np.int32, 1, offset=_BUSY_OFFSET))
