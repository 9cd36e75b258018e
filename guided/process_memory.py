"""Memory of this process: measure how much it holds (for the size of grammars), and return freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
import time
from pathlib import Path

_TRIM_BYTES = 64 << 20
"""Growth of the resident memory over its minimum above which freed memory is returned."""
_TRIM_SECONDS = 8.0
"""Interval at which the growth is checked."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3), glibc 2.33 and later."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


def held_bytes() -> int:
    """Return the number of bytes that all threads have allocated: with malloc, and for Python objects (an estimate)."""
    allocated = 64 * sys.getallocatedblocks()  # malloc allocates the objects over 512 bytes
    if _malloc_info is not None:
        info = _malloc_info()
        allocated += info.uordblks + info.hblkhd
    return allocated


def give_back_free_memory() -> None:
    """Return memory that the C library keeps for later allocations to the system (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class FreeMemory:
    """Returns freed memory of this process to the system. The C library would keep it.

    Loading a grammar, computing its first mask, and reading a large body temporarily take many times their size.
    """

    def __init__(self) -> None:
        self._least = _resident_bytes()
        """Resident memory in bytes: the minimum so far."""

    def watch(self) -> None:
        """Start a thread that calls `give_back` every few seconds."""

        def run() -> None:
            while True:
                time.sleep(_TRIM_SECONDS)
                self.give_back()

        threading.Thread(target=run, name="free-memory", daemon=True).start()

    def give_back(self) -> None:
        """Return freed memory if the process has grown by more than `_TRIM_BYTES` since its minimum.

        All of the growth may be in use, which can't be seen. An attempt then takes 15 ms per GB, in which no thread of
        the process allocates memory.
        """
        now = _resident_bytes()
        self._least = min(self._least, now)
        if now > self._least + _TRIM_BYTES:
            give_back_free_memory()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _find_malloc_info() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


_malloc_info = _find_malloc_info()
