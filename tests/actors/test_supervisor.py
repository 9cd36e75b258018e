"""What a supervisor does with an actor that cannot be started. No Ray."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from actors.supervision import supervisor
from actors.supervision.supervisor import IncarnationSettings, Supervisor
from guided.errors import PoolUnavailable


def test_a_crash_loop_is_slowed_down_and_then_shown_as_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_LAST_PAUSE_SECONDS", 0.4)
    attempts: list[float] = []

    def driver() -> None:
        attempts.append(time.monotonic())
        raise RuntimeError("no such luck")

    events: list[object] = []
    connected = threading.Event()
    connected.set()
    settings = SimpleNamespace(cluster=SimpleNamespace(driver=driver, connected=connected))
    supervised = Supervisor(0, cast(IncarnationSettings, settings), events.append)
    with pytest.raises(PoolUnavailable, match="no such luck"):
        supervised.wait_started(60)
    deadline = time.monotonic() + 60
    while supervised.status().state != "down":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(attempts) == 4
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert all(pause >= expected for pause, expected in zip(pauses, [0.05, 0.1, 0.2], strict=True))
    assert supervised.status().pid is None
    assert events == []
    supervised.stop()
    assert supervised.join(60)
