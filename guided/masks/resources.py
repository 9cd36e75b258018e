"""What this process may use and holds: the number of its CPUs, and its memory (for the
size of grammars)."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from pathlib import Path

import psutil

_TRIM_BYTES = 64 << 20
"""Growth of the resident memory over its minimum above which freed memory is
returned."""
_TRIM_SECONDS = 8.0
"""Interval at which the growth is checked."""
_ROOT = Path("/")


def available_cpus(root: Path = _ROOT) -> int:
    """Return how many CPUs this process may use, at least 1: its affinity, and the
    quotas of its control groups (v2).

    A quota is rounded up to whole CPUs.

    Args:
        root: where `/proc` and `/sys` are.
    """
    cpus: float = len(os.sched_getaffinity(0))
    mount = root / "sys/fs/cgroup"
    group = ""
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = next(
            (line[len("0::/") :] for line in lines if line.startswith("0::/")), ""
        )
    # in a container, its own group is usually the mount
    for directory in ((mount / group), *(mount / group).parents):
        # no such file, or the quota is "max"
        with contextlib.suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
            cpus = min(cpus, int(quota) / int(period))
    return max(1, math.ceil(cpus))


def held_bytes() -> int:
    """Return the number of bytes that all threads have allocated: with malloc, and for
    Python objects (an estimate)."""
    # malloc allocates the objects over 512 bytes
    allocated = 64 * sys.getallocatedblocks()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        heap = psutil.heap_info()
        allocated += heap.heap_used + heap.mmap_used
    return allocated


def give_back_free_memory() -> None:
    """Return memory that the C library keeps for later allocations to the system
    (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        psutil.heap_trim()


def watch_free_memory() -> None:
    """Start a thread that returns freed memory of this process to the system. The C
    library would keep it.

    Loading a grammar, its first mask, and reading a large body temporarily take many
    times their size.
    """

    def run() -> None:
        resident = psutil.Process().memory_info
        least = resident().rss
        while True:
            time.sleep(_TRIM_SECONDS)
            now = resident().rss
            least = min(least, now)
            if now > least + _TRIM_BYTES:
                give_back_free_memory()

    threading.Thread(target=run, name="free-memory", daemon=True).start()
