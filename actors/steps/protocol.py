"""The step protocol: the slot table that the engine and one worker share, and the messages between them.

A sequence that is open on a worker holds a slot there, one line of the table. Each column has one writer:

    tokens[slot, :]   engine   output tokens since the last mask, at most `MAX_NEW_TOKENS`
    target[slot]      engine   the version of the output that a mask is wanted for; negative once the slot was freed
    ready[slot]       worker   the version that `mask[slot]` is for; negative if no sequence holds the slot
    mask[slot, :]     worker   the token bitmask
    forced[slot, :]   worker   the tokens from here on that have no alternative, -1 behind the last
    seconds[slot]     worker   seconds that accepting the tokens and filling the mask took
    status[slot]      worker   `OK`; `STEERED`: a mask was restricted, so that the output fits in its budget; or
                               `FAILED`: the sequence is over, and a message says why

A *version* is the number of output tokens, plus the slot's edit count in the upper 32 bits. The count grows whenever
the output changes by a message (open, edit) instead of through the columns, so that no two outputs of a slot share a
version. The engine writes to `tokens[slot]` only while `ready[slot] == target[slot]`. Once the worker has handled
everything it was sent, `ready` equals `target` in all slots but the failed ones.

The table is a memfd, which the worker opens through `/proc/<pid>/fd`, so that it vanishes with its owner. (Python
3.11's `multiprocessing.shared_memory` does not: the resource tracker of a killed actor unlinks the engine's segment.)

In the usual step the engine writes `tokens` and `target` of the batch's slots and sends one `Fill` with the slot
numbers; after the forward pass it compares `ready` with `target`. Everything else is a message in the same socket,
handled in order. A slot is used again only after the worker has handled its `Free`, or the worker's process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from guided.completing.budget import Budget
from guided.errors import Wire
from guided.pools.protocol import MAX_FORCED_TOKENS

MAX_NEW_TOKENS = 8
"""New tokens of a slot that fit in the table; more are sent in a message."""
POSITION = (1 << 32) - 1
"""Mask of the bits of a version that hold the number of output tokens."""
EDIT = 1 << 32
"""One edit, in a version."""
FREE = -1
"""`ready` of a slot that no sequence has held yet."""
OK, FAILED, STEERED = 0, 1, 2
IDLE, IMPORTING, UNKNOWN = -1, -2, -3
"""`busy` of a thread that fills no row, of one that imports a grammar library, which takes seconds, and of an actor on
another node that has not said yet what it fills."""
THREADS = 2
"""Threads of a worker that fill rows."""
SLOW_SECONDS = 0.001
"""If the last mask of a row took longer than this, the row is filled after quicker rows."""
_NONCE_BYTES = 32
_MARK_OFFSET = 64
_MARK = np.dtype(
    [("since", "f8", THREADS), ("busy", "i4", THREADS), ("seconds", "f8"), ("filled", "i8"), ("wake", "i4")]
)
_COLUMNS_OFFSET = 128


class Fill(msgspec.Struct, array_like=True, tag=0, gc=False, frozen=True):
    """Fill the masks after the tokens in the table."""

    slots: bytes
    """int32 `[n]`, in native byte order."""
    look_ahead: bool = False
    """Fill `forced` too."""


class Load(msgspec.Struct, array_like=True, tag=1, gc=False, frozen=True):
    """Load a compiled grammar when a sequence of it is first filled. Sent before the first `Open` with its key."""

    key: str
    backend: str
    constraint: bytes
    """The constraint, encoded with msgpack."""
    dumped: bytes
    """The serialized grammar."""


class Unload(msgspec.Struct, array_like=True, tag=2, gc=False, frozen=True):
    """Drop grammars that are not used any more."""

    keys: list[str]


class Open(msgspec.Struct, array_like=True, tag=3, gc=False, frozen=True):
    """Open a sequence in a free slot, and fill its mask."""

    slot: int
    version: int
    """The version of the output, with a new edit count."""
    grammar: str
    """Key of the grammar."""
    parent: int | None
    """Slot of the matcher to copy."""
    tokens: list[int]
    """The sequence's whole output so far."""
    request_id: str = ""
    """For the worker's log."""
    budget: Budget | None = None
    """The constraint is completed within it."""
    seconds: float = 0.0
    """Estimate for this mask: slow rows are filled last."""


class Edit(msgspec.Struct, array_like=True, tag=4, gc=False, frozen=True):
    """Replace the output of a slot's sequence from position `start` on, and fill the mask."""

    slot: int
    version: int
    start: int
    tokens: list[int]


class Free(msgspec.Struct, array_like=True, tag=5, gc=False, frozen=True):
    """Close the matcher in a slot; acknowledged by `ready[slot] = version`, which is negative."""

    slot: int
    version: int


Request = Fill | Load | Unload | Open | Edit | Free
"""From the engine; a frame is a list of them."""


class Failed(msgspec.Struct, array_like=True, tag=0, gc=False, frozen=True):
    """The sequence in a slot is over."""

    slot: int
    version: int
    error: Wire


class Filled(msgspec.Struct, array_like=True, tag=1, gc=False, frozen=True):
    """Wakes the engine: the worker has filled what it can fill now."""


Answer = Failed | Filled
"""From the worker; a frame is one of them."""


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What an actor needs to open a segment, and to verify that it is the right one."""

    pid: int
    fd: int
    nonce: bytes
    slots: int
    words: int


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The columns (see the module's docstring), and the worker's progress mark."""

    tokens: NDArray[np.int32]
    target: NDArray[np.int64]
    ready: NDArray[np.int64]
    mask: NDArray[np.int32]
    forced: NDArray[np.int32]
    seconds: NDArray[np.float32]
    status: NDArray[np.int32]
    mark: NDArray[np.void]
    """`[1]`. `busy`: for each thread of the worker the slot that it fills, `IDLE` or `IMPORTING`. `since`: the
    `time.monotonic()` at which it began. `filled`: number of masks so far. `seconds`: their wall time. `wake`: the
    engine waits; the worker sends a message when it is done."""

    @classmethod
    def over(cls, memory: mmap.mmap | bytearray, slots: int, words: int) -> SlotTable:
        """Return the table that lies in `memory`, of `_size(slots, words)` bytes."""
        offset = _COLUMNS_OFFSET
        columns: dict[str, NDArray[np.generic]] = {}
        for name, dtype in (("target", np.int64), ("ready", np.int64), ("seconds", np.float32), ("status", np.int32)):
            columns[name] = np.frombuffer(memory, dtype, slots, offset)
            offset += columns[name].nbytes
        tokens = np.frombuffer(memory, np.int32, slots * MAX_NEW_TOKENS, offset).reshape(slots, MAX_NEW_TOKENS)
        offset += tokens.nbytes
        forced = np.frombuffer(memory, np.int32, slots * MAX_FORCED_TOKENS, offset).reshape(slots, MAX_FORCED_TOKENS)
        mask = np.frombuffer(memory, np.int32, slots * words, _mask_offset(slots)).reshape(slots, words)
        mark = np.frombuffer(memory, _MARK, 1, _MARK_OFFSET)
        return cls(tokens=tokens, mask=mask, forced=forced, mark=mark, **columns)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Mark every slot as free and the worker as idle."""
        self.target[:] = FREE
        self.ready[:] = FREE
        self.forced[:] = -1
        self.mark["busy"] = IDLE


def in_fill_order(slots: NDArray[Any], table: SlotTable) -> NDArray[Any]:
    """Return `slots` in the order in which a worker fills them: those with a slow last mask come last."""
    last = table.seconds[slots]
    return slots[np.argsort(last, kind="stable")] if (last > SLOW_SECONDS).any() else slots


def _size(slots: int, words: int) -> int:
    return _mask_offset(slots) + slots * words * 4


def _mask_offset(slots: int) -> int:
    columns = slots * (8 + 8 + 4 + 4 + 4 * MAX_NEW_TOKENS + 4 * MAX_FORCED_TOKENS)
    return -(-(_COLUMNS_OFFSET + columns) // mmap.PAGESIZE) * mmap.PAGESIZE


def freed(version: int) -> int:
    """Return the version of a slot that is freed: negative, and another one for each sequence that held the slot.

    Args:
        version: the slot's last version.
    """
    return ~(version // EDIT)


class Segment:
    """Engine side: creates the shared memory of one table.

    Pages are allocated when a slot's mask is first written, so reserving many slots costs nothing.
    """

    def __init__(self, slots: int, words: int) -> None:
        length = _size(slots, words)
        self._fd = os.memfd_create("guided-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, length)
        # An actor that shrank it would cause a SIGBUS in the engine.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, length)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._map[:_NONCE_BYTES] = nonce
        self.table = SlotTable.over(self._map, slots, words)
        self.table.clear()
        self.name = SegmentName(os.getpid(), self._fd, nonce, slots, words)

    def close(self) -> None:
        """Drop the memory. A worker that has it mapped may still write, but nothing reads it any more. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.table = SlotTable.over(bytearray(_size(0, self.name.words)), 0, self.name.words)
            with contextlib.suppress(BufferError):  # an array still refers to it: it is unmapped with the last one
                self._map.close()


def attach(name: SegmentName) -> SlotTable | None:
    """Actor side: map a segment; return None if this process cannot reach that memory.

    Another machine may have the same pid and descriptor: only the nonce proves that it is the same segment.
    """
    try:
        fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        length = _size(name.slots, name.words)
        if os.fstat(fd).st_size != length:
            return None
        mapped = mmap.mmap(fd, length)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return SlotTable.over(mapped, name.slots, name.words) if mapped[:_NONCE_BYTES] == name.nonce else None
