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

_NONCE_BYTES = 32
_MARK_OFFSET, _MARK = 64, np.dtype([("since", np.float64), ("busy", np.int32), ("wanted", np.int32)])
_DONE_OFFSET = 128
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
    """The memory itself, mapped. Both sides look at it without a message."""

    masks: NDArray[np.int32]
    """`[rows, words]`."""
    done: NDArray[np.int64]
    """`[rows]`: the number of the request whose mask is in that row, written after the mask."""
    seconds: NDArray[np.float32]
    """`[rows]`: what that mask took."""
    mark: NDArray[np.void]
    """`[1]`. `busy`: the row that the worker is filling, or `IDLE`: tells whose fault it is where a worker never
    answers; `since`: the `time.monotonic()` at which it began. `wanted`: the engine waits; say so when all is done."""

    @classmethod
    def private(cls, rows: int, words: int) -> Rows:
        """Memory that nobody else sees."""
        return cls.over(bytearray(size(rows, words)), rows, words)

    @classmethod
    def over(cls, memory: mmap.mmap | bytearray, rows: int, words: int) -> Rows:
        """`memory`, of `size(rows, words)` bytes, zeroed or in use already."""
        masks = np.frombuffer(memory, np.int32, rows * words, offset=_masks_offset(rows)).reshape(rows, words)
        done = np.frombuffer(memory, np.int64, rows, offset=_DONE_OFFSET)
        seconds = np.frombuffer(memory, np.float32, rows, offset=_DONE_OFFSET + 8 * rows)
        return cls(masks, done, seconds, np.frombuffer(memory, _MARK, 1, offset=_MARK_OFFSET))


def size(rows: int, words: int) -> int:
    """Bytes of a segment."""
    return _masks_offset(rows) + rows * words * 4


def _masks_offset(rows: int) -> int:
    return -(-(_DONE_OFFSET + 12 * rows) // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment:
    """Engine side: makes the memory and names it.

    Memory is taken as rows are first written; reserving many costs nothing.
    """

    def __init__(self, rows: int, words: int) -> None:
        length = size(rows, words)
        self._fd = os.memfd_create("guided-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, length)
        # Nobody can shrink it under the engine's feet: that would be a SIGBUS there.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, length)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._map[:_NONCE_BYTES] = nonce
        self.rows = Rows.over(self._map, rows, words)
        self.rows.mark["busy"] = IDLE
        self.name = SegmentName(os.getpid(), self._fd, nonce, rows, words)

    def close(self) -> None:
        """Drop it; a worker that still has it mapped writes where nobody reads any more. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self.rows = Rows.private(0, self.rows.masks.shape[1])
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
        length = size(name.rows, name.words)
        if os.fstat(fd).st_size != length:
            return None
        mapped = mmap.mmap(fd, length)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return Rows.over(mapped, name.rows, name.words) if mapped[:_NONCE_BYTES] == name.nonce else None
