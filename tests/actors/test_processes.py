"""Which processes can look each other up by their pids, and which are ending."""

from __future__ import annotations

import os
import subprocess

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
