"""Memory of this process: how much it holds, to measure what a grammar takes, and giving back what it has freed."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
import time
from pathlib import Path

_BLOCK_BYTES = 64
"""A usual Python object that is not allocated with malloc, which takes those from 512 bytes on."""
_TRIM_BYTES, _TRIM_SECONDS = 64 << 20, 5.0
"""Freed memory is given back from so much growth on. How often it is looked at."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3), glibc 2.33 and later."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


def held_bytes() -> int:
    """Return the bytes that are allocated now in all threads: by malloc, and for Python objects (an estimate)."""
    allocated = sys.getallocatedblocks() * _BLOCK_BYTES
    if _malloc_info is not None:
        info = _malloc_info()
        allocated += info.uordblks + info.hblkhd
    return allocated


def give_back_free_memory() -> None:
    """Return memory that the C library keeps for later allocations to the system (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class FreeMemory:
    """Returns freed memory of this process to the system, which the C library would keep.

    Loading a grammar, its first mask, or reading a large body temporarily takes many times its size.
    """

    def __init__(self) -> None:
        self._least = _resident_bytes()

    def watch(self) -> None:
        """Look after it from now on, in a thread of its own."""

        def run() -> None:
            while True:
                time.sleep(_TRIM_SECONDS)
                self.give_back()

        threading.Thread(target=run, name="free-memory", daemon=True).start()

    def give_back(self) -> None:
        """Do so if the process has much more memory than it had once. Whether that is in use cannot be seen, and to try
        takes less than a millisecond."""
        resident = _resident_bytes()
        self._least = min(self._least, resident)
        if resident > self._least + _TRIM_BYTES:
            give_back_free_memory()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _find_malloc_info() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


_malloc_info = _find_malloc_info()
