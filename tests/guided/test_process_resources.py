"""The CPUs that a process may use, and memory that it gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guided.masks.resources import available_cpus


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3,
        ),
    ],
)
def test_the_quota_of_a_container_counts(
    eight_cpus: None, tmp_path: Path, files: dict[str, str], cpus: int
) -> None:
    write(tmp_path, files)
    assert available_cpus(tmp_path) == cpus


def test_freed_memory_is_given_back() -> None:
    pieces = 300_000
    script = f"""
import time
from pathlib import Path
from guided.masks.resources import watch_free_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
watch_free_memory()
held = [bytearray(1000) for _ in range({pieces})]
time.sleep(2)  # it is looked at while it is in use
last = held[-1]  # keeps the top of the heap in use
del held
before = resident()
deadline = time.monotonic() + 60
while (less := before - resident()) < {500 * pieces} and time.monotonic() < deadline:
    time.sleep(0.1)
print(less)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) >= 500 * pieces
