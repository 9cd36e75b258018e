"""The quarantine: which ends of actors count, and for how long."""

from __future__ import annotations

import pytest

from actors.quarantine import Quarantine


def test_two_ends_within_ten_minutes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("actors.quarantine.time.monotonic", lambda: now)
    tested, refused = Quarantine(), []
    for now in (100.0, 100.5, 701.0, 703.0, 1300.0, 1302.0):  # noqa: B007
        tested.note("key")
        refused.append(tested.keys() == ["key"])
    assert refused == [False, False, False, True, True, True], (
        "ends at the same time have the same cause"
    )
    assert tested.total == 1
    now = 1902.5
    assert tested.error("key") is None
    assert tested.keys() == []
