"""Which processes can look each other up by their pids."""

from __future__ import annotations

import os

from actors.processes import ActorLocation, Owner, pid_namespace


def test_only_processes_of_the_same_node_and_container_can_look_each_other_up() -> None:
    here = ActorLocation(os.getpid(), "a", "host", "10.0.0.1", pid_namespace())
    assert here.is_beside("a")
    assert not here.is_beside("b")
    assert not here._replace(pid_namespace=pid_namespace() + 1).is_beside("a")


def test_an_owner_tells_its_container() -> None:
    owner = Owner.this_process("a")
    assert (owner.pid, owner.node_id, owner.pid_namespace) == (os.getpid(), "a", pid_namespace())
