"""Suspensions: for one client first, for all clients when the crashes come from several."""

from __future__ import annotations

import pytest

from guided.errors import BackendSuspended
from guided.pools.suspensions import CRASHES, Suspensions

NAMES = ("llguidance", "xgrammar")


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def suspensions(clock: _Clock) -> Suspensions:
    return Suspensions(NAMES, clock)


def crash(suspensions: Suspensions, client: str, count: int = CRASHES) -> None:
    for index in range(count):
        suspensions.crashed("llguidance", f"{client}{index}", client)


def test_a_client_that_crashes_a_backend_loses_it_alone(suspensions: Suspensions, clock: _Clock) -> None:
    crash(suspensions, "one")
    assert suspensions.admitted(NAMES, "one") == ("xgrammar",)
    with pytest.raises(BackendSuspended):
        suspensions.admitted(NAMES[:1], "one")
    assert suspensions.admitted(NAMES, "other") == NAMES
    assert suspensions.error(NAMES, "other") is None
    assert [each.state for each in suspensions.status()] == ["up", "up"]
    assert suspensions.status()[0].suspensions == 1
    clock.now += 31
    assert suspensions.admitted(NAMES, "one") == NAMES


def test_crashes_of_several_clients_suspend_it_for_all(suspensions: Suspensions) -> None:
    crash(suspensions, "one", CRASHES - 1)
    suspensions.crashed("llguidance", "another constraint", "two")
    for client in ("one", "two", "three"):
        assert suspensions.admitted(NAMES, client) == ("xgrammar",)
    assert suspensions.status()[0].state == "suspended"


def test_each_suspension_that_follows_soon_is_twice_as_long(suspensions: Suspensions, clock: _Clock) -> None:
    crash(suspensions, "one")
    clock.now += 31
    crash(suspensions, "one")
    clock.now += 31
    assert suspensions.admitted(NAMES, "one") == ("xgrammar",)
    clock.now += 30
    assert suspensions.admitted(NAMES, "one") == NAMES
