"""The number of CPUs that this process may use: its affinity, and the quotas of its control groups (version 2)."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_ROOT = Path("/")


def available_cpus(root: Path = _ROOT) -> int:
    """Return how many CPUs this process may use, at least 1. A quota is rounded up to whole CPUs.

    Args:
        root: where `/proc` and `/sys` are.
    """
    cpus: float = len(os.sched_getaffinity(0))
    mount, group = root / "sys/fs/cgroup", ""
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    for directory in ((mount / group), *(mount / group).parents):  # in a container, its own group is usually the mount
        with contextlib.suppress(OSError, ValueError):  # no such file, or the quota is "max"
            quota, period = (directory / "cpu.max").read_text().split()
            cpus = min(cpus, int(quota) / int(period))
    return max(1, math.ceil(cpus))
