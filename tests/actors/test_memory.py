"""What processes take and may take, in processes of their own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from actors.processes import ProcessHandle, machine_bytes, memory_limit

MIB = 1 << 20

EATER = """
from actors.processes import limit_memory
limit_memory(200 << 20)
eaten = []
try:
    while len(eaten) < 100:
        eaten.append(bytearray(b"x" * (16 << 20)))
except MemoryError:
    print("refused after", 16 * len(eaten), "MiB")
"""


def test_beyond_the_limit_and_some_slack_no_memory_is_to_be_had() -> None:
    ran = subprocess.run([sys.executable, "-c", EATER], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert 200 < int(ran.stdout.split()[2]) < 200 + 1024


def test_the_memory_of_a_process() -> None:
    process = ProcessHandle(os.getpid())
    before = process.resident()
    with mmap.mmap(-1, 64 * MIB) as eaten:  # malloc may reuse pages that are resident already
        eaten.write(b"x" * (64 * MIB))
        assert process.resident() - before > 48 * MIB
    assert ProcessHandle(None).resident() == 0


@pytest.mark.parametrize(
    ("wanted", "hard"),
    [(None, min(2048 * MIB, machine_bytes() // 2)), (300 * MIB, 300 * MIB), (1 << 60, machine_bytes())],
)
def test_no_limit_is_more_than_the_machine_has(wanted: int | None, hard: int) -> None:
    assert memory_limit(wanted) == hard
