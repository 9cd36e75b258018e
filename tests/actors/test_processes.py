"""Which processes can look each other up by their pids, and which are ending."""

from __future__ import annotations

import os
import subprocess
import sys

from actors.processes import ProcessLocation, ProcessReading


def test_only_processes_of_the_same_node_and_container_can_look_each_other_up() -> None:
    here = ProcessLocation.here("a")
    assert (here.pid, here.node_id) == (os.getpid(), "a")
    assert here.is_beside("a")
    assert not here.is_beside("b")
    assert not here._replace(pid_namespace=here.pid_namespace + 1).is_beside("a")


def test_a_process_is_ending_from_its_kill_on() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        reading = ProcessReading.of(process.pid)
        assert reading is not None
        location = ProcessLocation(process.pid, "node", started=reading.started)
        assert not location.is_ending()
        assert location._replace(started=reading.started - 1).is_ending(), "another process has got its pid"
        process.kill()
        assert location.is_ending(), "it is not reaped yet"
    assert location.is_ending()


def test_freed_memory_is_given_back() -> None:
    pieces = 300_000
    script = f"""
import os, time
from actors.processes import FreeMemory, ProcessReading
FreeMemory().watch()
held = [bytearray(1000) for _ in range({pieces})]
time.sleep(6)  # it is looked at while it is in use
last = held[-1]  # keeps the top of the heap in use
del held
before = ProcessReading.of(os.getpid()).resident
deadline = time.monotonic() + 60
while (less := before - ProcessReading.of(os.getpid()).resident) < {500 * pieces} and time.monotonic() < deadline:
    time.sleep(0.1)
print(less)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 500 * pieces
