"""What a supervisor does with an actor that cannot be started or ends again and again. No Ray."""

from __future__ import annotations

import threading
import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from actors.supervision.supervisor import IncarnationSettings, RestartPolicy, Supervisor
from guided.errors import PoolUnavailable


def test_a_crash_loop_is_slowed_down_and_then_shown_as_down() -> None:
    attempts: list[float] = []

    def driver() -> None:
        attempts.append(time.monotonic())
        raise RuntimeError("no such luck")

    events: list[object] = []
    connected = threading.Event()
    connected.set()
    settings = SimpleNamespace(cluster=SimpleNamespace(driver=driver, connected=connected), grammars=None)
    supervisor = Supervisor(
        0, cast(IncarnationSettings, settings), count(1).__next__, events.append, RestartPolicy(first_delay=0.05)
    )
    with pytest.raises(PoolUnavailable, match="no such luck"):
        supervisor.wait_started()
    deadline = time.monotonic() + 60
    while supervisor.status().state != "down":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(attempts) == 5
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert all(pause >= expected for pause, expected in zip(pauses, [0.05, 0.1, 0.2, 0.4], strict=True))
    assert supervisor.status().pid is None
    assert events == []
    supervisor.stop()
    assert supervisor.join(60)


def test_an_actor_that_was_up_is_replaced_without_a_longer_pause() -> None:
    policy = RestartPolicy(first_delay=0.5, clock=lambda: 100.0)
    assert [policy.next_pause(3.0) for _ in range(12)] == [(0.5, False)] * 12
    assert [policy.next_pause(1.0) for _ in range(5)] == [
        (1.0, False),
        (2.0, False),
        (4.0, False),
        (8.0, False),
        (30.0, True),
    ]
    assert policy.next_pause(3.0) == (30.0, True)
