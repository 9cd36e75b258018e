"""What processes take and may take, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.processes import machine_bytes, memory_limit

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


@pytest.mark.parametrize(
    ("wanted", "hard"),
    [(None, min(2048 * MIB, machine_bytes() // 2)), (300 * MIB, 300 * MIB), (1 << 60, machine_bytes())],
)
def test_no_limit_is_more_than_the_machine_has(wanted: int | None, hard: int) -> None:
    assert memory_limit(wanted) == hard
