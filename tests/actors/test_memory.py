"""What processes take and may take, in processes of their own."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import pytest

from actors.processes import ProcessReading, machine_bytes, memory_limit

MIB = 1 << 20

EATER = """
import sys, threading, time
from actors.processes import limit_memory
limit_memory(200 << 20, watched=sys.argv[1] == "watched")
eaten = []
try:
    while len(eaten) < 100:
        eaten.append(bytearray(b"x" * (16 << 20)))
        if sys.argv[1] == "alone":
            time.sleep(0.05)
except MemoryError:
    print("refused after", 16 * len(eaten), "MiB")
"""


def run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", EATER, how], capture_output=True, text=True, timeout=60)


def test_beyond_the_limit_and_some_slack_no_memory_is_to_be_had() -> None:
    """Even if nothing can watch the process."""
    ran = run("watched")
    assert ran.returncode == 0, ran.stderr
    assert 200 < int(ran.stdout.split()[2]) < 200 + 1024


def test_an_unwatched_process_ends_itself() -> None:
    ran = run("alone")
    assert ran.returncode == -signal.SIGKILL
    assert "more than 200 MiB of memory" in ran.stderr


def test_a_reading() -> None:
    before = ProcessReading.of(os.getpid())
    with mmap.mmap(-1, 64 * MIB) as eaten:  # malloc may reuse pages that are resident already
        eaten.write(b"x" * (64 * MIB))
        after = ProcessReading.of(os.getpid())
    assert before is not None
    assert after is not None
    assert after.resident - before.resident > 48 * MIB
    assert not after.stopped
    assert ProcessReading.of(2**22 + 1) is None  # beyond any pid


def test_a_stopped_process_is_seen_to_be() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        reading = ProcessReading.of(process.pid)
        assert reading is not None
        assert reading.stopped
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("wanted", "hard"),
    [(None, min(2048 * MIB, machine_bytes() // 2)), (300 * MIB, 300 * MIB), (1 << 60, machine_bytes())],
)
def test_no_limit_is_more_than_the_machine_has(wanted: int | None, hard: int) -> None:
    assert memory_limit(wanted) == hard
