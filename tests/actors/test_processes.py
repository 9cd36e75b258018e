"""Which processes can look each other up by their pids, and which are ending."""

from __future__ import annotations

import os

from actors.processes import ProcessLocation


def test_only_processes_of_the_same_node_and_container_can_look_each_other_up() -> None:
    here = ProcessLocation.here("a")
    assert (here.pid, here.node_id) == (os.getpid(), "a")
    assert here.is_beside("a")
    assert not here.is_beside("b")
    assert not here._replace(pid_namespace=here.pid_namespace + 1).is_beside("a")
