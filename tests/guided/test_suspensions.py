"""Suspensions of backends whose compile processes crash."""

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


def crash(suspensions: Suspensions, count: int = CRASHES) -> None:
    for index in range(count):
        suspensions.crashed("llguidance", str(index))


def test_several_constraints_that_crash_a_backend_suspend_it(suspensions: Suspensions, clock: _Clock) -> None:
    crash(suspensions, CRASHES - 1)
    suspensions.crashed("llguidance", "0")
    assert suspensions.admitted(NAMES) == NAMES, "one constraint that crashes twice is one"
    suspensions.crashed("llguidance", "another")
    assert suspensions.admitted(NAMES) == ("xgrammar",)
    with pytest.raises(BackendSuspended):
        suspensions.admitted(NAMES[:1])
    assert suspensions.error(NAMES[1:]) is None
    assert [each.state for each in suspensions.status()] == ["suspended", "up"]
    clock.now += 31
    assert suspensions.admitted(NAMES) == NAMES


def test_each_suspension_that_follows_soon_is_twice_as_long(suspensions: Suspensions, clock: _Clock) -> None:
    crash(suspensions)
    clock.now += 31
    crash(suspensions)
    clock.now += 31
    assert suspensions.admitted(NAMES) == ("xgrammar",)
    clock.now += 30
    assert suspensions.admitted(NAMES) == NAMES
