"""What a supervisor does with an actor that won't live. No Ray."""

from __future__ import annotations

import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.supervision import supervisor as module
from actors.supervision.supervisor import Cause, IncarnationSettings, Supervisor
from guided.errors import PoolUnavailable


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When an actor was to be made; none ever is."""
    made: list[float] = []

    def create(supervisor: Supervisor) -> Any:
        made.append(time.monotonic())
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Supervisor, "_create", create)
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.05)
    return made


def test_a_crash_loop_is_slowed_down_and_then_shown_as_down(attempts: list[float]) -> None:
    news: list[object] = []
    plan = SimpleNamespace(cluster=SimpleNamespace(check=lambda: None))
    supervisor = Supervisor(0, cast(IncarnationSettings, plan), count(1).__next__, news.append)
    with pytest.raises(PoolUnavailable, match="no such luck"):
        supervisor.wait_started()
    deadline = time.monotonic() + 60
    while supervisor.status().state != "down":
        assert time.monotonic() < deadline
    assert len(attempts) == 5
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert all(pause >= expected for pause, expected in zip(pauses, [0.05, 0.1, 0.2, 0.4], strict=True))
    assert supervisor.status().pid is None
    assert news == []
    supervisor.stop()
    assert supervisor.join(60)


def test_who_was_up_is_replaced_without_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[float] = []

    def live(supervisor: Supervisor) -> Cause:
        lives.append(time.monotonic())
        supervisor._up_since = time.monotonic() - 1.0
        return "died"

    monkeypatch.setattr(Supervisor, "_live", live)
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(module, "_PROVEN_SECONDS", 0.5)
    supervisor = Supervisor(0, cast(IncarnationSettings, None), count(1).__next__, lambda news: None)
    deadline = time.monotonic() + 60
    while len(lives) < 12:  # were the pauses doubled, the last would be of 10 s
        assert time.monotonic() < deadline
        assert supervisor.status().state != "down"
    supervisor.stop()
    assert supervisor.join(60)
