"""How much memory this process holds: to measure what a compiled grammar takes. No library reports it for all kinds."""

from __future__ import annotations

import ctypes
import sys

_BLOCK_BYTES = 64
"""A usual Python object that is not allocated with malloc, which takes those from 512 bytes on."""


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


def _find_malloc_info() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


_malloc_info = _find_malloc_info()
