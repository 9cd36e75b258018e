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
    for directory in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the quota is "max"
            quota, period = (directory / "cpu.max").read_text().split()
            cpus = min(cpus, int(quota) / int(period))
    return max(1, math.ceil(cpus))


def _control_groups(root: Path) -> list[Path]:
    """Return the directories of the control groups that this process is in, and of their parents, as far as they are
    visible. In a container, the container's own group is usually the root."""
    mount = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = mount / line.removeprefix("0::").lstrip("/")
                return [group, *(each for each in group.parents if each.is_relative_to(mount))]
    return []
