"""What the engine and one worker share: the channel between them, its messages, and the
slot table.

A sequence that is open on a worker holds a slot there, one line of the `SlotTable`. In
the usual step the engine writes `tokens` and `target` of the batch's slots and sends
one `Fill` with the slot numbers; after the forward pass it compares `ready` with
`target`. Everything else is a message in the same socket, handled in order. A slot is
used again only after the worker has handled its `Free`, or the worker's process is
gone. Grammars have a socket of their own, which only the thread reads that loads them.
They have numbers, in the order in which they are sent.

A *version* is the number of output tokens, plus the slot's edit count in the upper 32
bits. The count grows whenever the output changes by a message (open, edit) instead of
through the columns, so that no two outputs of a slot share a version. The engine writes
to `tokens[slot]` only while `ready[slot] == target[slot]`, so the worker reads both
when it fills the row. Once the worker has handled everything it was sent, `ready`
equals `target` in all slots but the failed ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.packages import Package, packed, receive, receive_descriptor, send_package
from guided.errors import Wire
from guided.pools.protocol import MAX_FORCED_TOKENS

POSITION = (1 << 32) - 1
"""Mask of the bits of a version that hold the number of output tokens."""
EDIT = 1 << 32
"""One edit, in a version."""
FREE = -1
"""`ready` of a slot that no sequence has held yet."""
OK = 0
FAILED = 1
STEERED = 2
CHECKED = 4
"""Values of `status`. The last two may be combined."""
IDLE = -1
"""`busy` of a thread that does nothing."""
ACTIVITIES: tuple[Literal["fill", "load", "import"], ...] = (
    "fill",
    "fill",
    "load",
    "import",
)
"""What the threads of a worker do, by the place in the mark: two fill rows, the third
loads grammars and imports libraries."""
FIRST, SECOND, LOAD, IMPORT = range(len(ACTIVITIES))
BEAT_SECONDS = 0.2
"""Interval of a worker's heartbeat."""
SLOW_SECONDS = 0.001
"""If the last mask of a row took longer than this, the next one is expected to be
slow."""
WAKE = b"w"
"""A frame of the worker that only ends a wait of the engine."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end (SO_PEERCRED)."""
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Indices = NDArray[np.intp]
_MARK = np.dtype(
    [
        ("since", "f8", len(ACTIVITIES)),
        ("times", "f8", (len(ACTIVITIES), 2)),
        ("beat", "f8"),
        ("busy", "i4", len(ACTIVITIES)),
        ("heart", "i4"),
    ],
    align=True,
)
_VETO = np.dtype([("length", "i4"), ("final", "i4"), ("keyword", "S24")])
_COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("target", "i8"),
    ("ready", "i8"),
    ("tokens", "i4"),
    ("status", "i4"),
    ("seconds", "f4"),
    ("forced", "i4", MAX_FORCED_TOKENS),
    ("veto", _VETO),
)


class Channel:
    """The engine's ends of two sockets, for steps and for grammars. For one incarnation
    only. Sends never block."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        """What the worker needs to connect."""
        self._steps = self._grammars = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._steps.bind(_address(self.name))
        self._steps.listen(2)
        self._unsent: tuple[deque[Package], deque[Package]] = (deque(), deque())
        """Grammars, and messages."""

    def accept(self, timeout: float, slots: int, words: int) -> SlotTable:
        """Return the table of the worker that connects. Nothing can connect after this.

        Raises:
            OSError: no worker of this user connected within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        ends: list[socket.socket] = []
        with self._steps as listening:
            while len(ends) < 2:
                listening.settimeout(max(0.001, deadline - time.monotonic()))
                end, _ = listening.accept()
                # all users can see the address
                if _user(end) == os.getuid():
                    end.settimeout(timeout)
                    ends.append(end)
                else:
                    end.close()
        self._steps, self._grammars = ends
        with FileIO(receive_descriptor(self._grammars)[1]) as memory:
            table = SlotTable.over(memory.fileno(), slots, words)
        self._steps.setblocking(False)
        self._grammars.setblocking(False)
        return table

    @property
    def fd(self) -> int:
        """The descriptor to poll: readable if there is a message; `POLLHUP` once the
        worker's end is closed."""
        return self._steps.fileno()

    def send(self, package: Package, is_grammar: bool = False) -> None:
        """Queue a message or a grammar, and send what the sockets take now.

        A lost connection is noticed by its supervisor.
        """
        self._unsent[not is_grammar].append(package)
        self.push()

    def push(self) -> None:
        """Send what is left of the queues."""
        for end, unsent in zip(
            (self._grammars, self._steps), self._unsent, strict=True
        ):
            # the socket's buffer is full, or the connection is lost
            with contextlib.suppress(OSError):
                while unsent:
                    unsent[0] = packed(unsent[0])  # once, however often it is tried
                    send_package(end, unsent[0])
                    unsent.popleft()

    def receive(self) -> bytes | mmap.mmap | None:
        """Return the next message that has arrived, or None."""
        try:
            return receive(self._steps)
        except (EOFError, OSError):  # nothing has arrived, or the connection is lost
            return None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._steps.close()
        self._grammars.close()


def _address(name: str) -> str:
    """Return an abstract address (unix(7)), which leaves no file. It is another one in
    another PID namespace."""
    return f"\0guided-{os.readlink('/proc/self/ns/pid')}-{name}"


def connect(
    name: str, slots: int, words: int
) -> tuple[socket.socket, socket.socket, SlotTable]:
    """Worker side: connect to the `Channel` of this name. Returns the ends for steps
    and for grammars, and a new table.

    Raises OSError if this process cannot reach the engine's.
    """
    table, memory = create_table(slots, words)
    with memory, contextlib.ExitStack() as undo:
        steps, grammars = (
            undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(2)
        )
        steps.connect(_address(name))
        if _user(steps) != os.getuid():
            raise ConnectionRefusedError("the engine belongs to another user")
        grammars.connect(_address(name))
        socket.send_fds(grammars, [b"t"], [memory.fileno()])
        undo.pop_all()
    return steps, grammars, table


def _user(end: socket.socket) -> int:
    """Return the user of the process at the other end."""
    size = _CREDENTIALS.size
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def hang_up(end: socket.socket) -> None:
    """Worker side: end the connection, also for a thread that waits for a message."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Fill(msgspec.Struct, array_like=True, tag=0, gc=False, frozen=True):
    """Fill the masks after one more token each, which is in the table. `slots` is int32
    `[n]`."""

    slots: bytes


class Unload(msgspec.Struct, array_like=True, tag=2, gc=False, frozen=True):
    """Drop grammars that the engine has not used for long. Open sequences keep
    theirs."""

    numbers: list[int]


class Open(msgspec.Struct, array_like=True, tag=3, gc=False, frozen=True):
    """Open a sequence in a free slot, and fill its mask."""

    slot: int
    version: int
    """The version of the output, with a new edit count."""
    grammar: int
    """Number of the grammar, which may come later."""
    tokens: list[int]
    """The sequence's whole output so far."""
    request_id: str = ""
    budget: int | None = None
    """The constraint is completed within so many output tokens."""
    final: int | None = None
    """Output tokens after so many may be taken back. None: all stay."""


class Edit(msgspec.Struct, array_like=True, tag=4, gc=False, frozen=True):
    """Replace the output of a slot's sequence from position `start` on, and fill the
    mask."""

    slot: int
    version: int
    start: int
    tokens: list[int]


class Free(msgspec.Struct, array_like=True, tag=5, gc=False, frozen=True):
    """Close the matcher in a slot; acknowledged by `ready[slot] = target[slot]`, which
    is negative."""

    slot: int


Request = Fill | Unload | Open | Edit | Free
"""From the engine; a frame is a list of them."""


class Failed(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The sequence in a slot is over. From the worker: a frame is one `Failed`, or
    `WAKE`."""

    slot: int
    version: int
    error: Wire


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The columns, each with one writer, and the worker's progress mark."""

    target: Int64s
    """`[slots]`, by the engine: the version that a mask is wanted for; negative once
    the slot was freed."""
    ready: Int64s
    """`[slots]`, by the worker: the version that `mask` is for; negative if no sequence
    holds the slot."""
    tokens: Int32s
    """`[slots]`, by the engine: the output token since the last mask."""
    status: Int32s
    """`[slots]`, by the worker: `OK`; `STEERED`: a mask was restricted, so that the
    output fits in its budget; `CHECKED`: tokens may be taken back, see `veto`; or
    `FAILED`: the sequence is over, and a message says why."""
    seconds: NDArray[np.float32]
    """`[slots]`, by the worker: seconds that accepting the tokens and filling the mask
    took."""
    forced: Int32s
    """`[slots, MAX_FORCED_TOKENS]`, by the worker: the tokens from here on that have no
    alternative; -1 behind them."""
    veto: NDArray[np.void]
    """`[slots]`, by the worker: the fields of a `VetoReport`, with status `CHECKED`."""
    mask: Int32s
    """`[slots, words]`, by the worker: the token bitmask."""
    mark: NDArray[np.void]
    """`[1]`, by the worker. For each of `ACTIVITIES`, `busy`: the slot that is filled,
    the number of the grammar that is loaded, or `IDLE`; `since`: `time.monotonic()` of
    its beginning; `times`: seconds that the thread has run since then, and waited for a
    CPU. `beat`: `time.monotonic()` of the last heartbeat, and `heart`: the id of its
    thread."""
    wake: Int32s
    """`[1]`, by both: 1 while the engine waits. The worker then sends a message when it
    is done."""

    def has_work(self) -> bool:
        """Return whether the worker was asked for a mask, or to free a slot, and has
        not done so."""
        return bool(((self.target != self.ready) & (self.status != FAILED)).any())

    @classmethod
    def over(cls, fd: int, slots: int, words: int) -> SlotTable:
        """Map the memory of a table. It is unmapped with the last reference to one of
        the columns."""
        layout = _layout(slots, words)
        memory = np.ndarray((), layout, mmap.mmap(fd, layout.itemsize))
        return cls(**{name: memory[name] for name in layout.names or ()})


def _layout(slots: int, words: int) -> np.dtype[np.void]:
    columns = [
        ("mask", "i4", (slots, words)),
        ("mark", _MARK, (1,)),
        ("wake", "i4", (1,)),
    ]
    columns += [(name, dtype, (slots, *shape)) for name, dtype, *shape in _COLUMNS]
    return np.dtype(columns, align=True)


def freed(version: int) -> int:
    """Return the version that follows a slot's last one when it is freed: negative, and
    new for each sequence."""
    return ~(version // EDIT)


def create_table(slots: int, words: int) -> tuple[SlotTable, FileIO]:
    """Worker side: return a new table, and its memory, which the caller closes.

    Pages are allocated when a slot's mask is first written, so reserving many slots
    costs nothing.
    """
    memory = FileIO(
        os.memfd_create("guided-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+"
    )
    memory.truncate(_layout(slots, words).itemsize)
    # An actor that shrank it would cause a SIGBUS in the engine.
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    table = SlotTable.over(memory.fileno(), slots, words)
    table.target[:] = table.ready[:] = FREE
    table.forced[:] = -1
    table.mark["busy"] = IDLE
    return table, memory
