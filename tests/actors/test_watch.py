"""Which actor is ended, and why: by its heartbeat, the state of that thread, and what
the others are busy with."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from thread_cluster import ConnectedPair

from actors import watch
from actors.protocol import BEAT_SECONDS, FIRST, IMPORT, LOAD, SECOND, Free
from actors.watch import Watch

MASK_LIMIT = 2.0


class Scene:
    """A watch, the mark of an actor, and a clock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, is_remote: bool = False
    ) -> None:
        self.pair = ConnectedPair()
        weakref.finalize(self, self.pair.connection.close)
        self.mark = self.pair.table.mark
        self.now, self.state, self.times, self.memory = 0.0, "S", (0.0, 0.0), 0
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch, "thread_state", lambda *_: self.state)
        monkeypatch.setattr(watch, "thread_times", lambda *_: self.times)
        monkeypatch.setattr(watch.processes, "resident_bytes", lambda _: self.memory)
        process: Any = None if is_remote else SimpleNamespace(pid=os.getpid())
        self.watch = Watch(self.pair.connection, process, MASK_LIMIT, 1000)

    def busy(
        self, thread: int, seconds: float, wall: float | None = None, subject: int = 3
    ) -> None:
        wall = wall or seconds
        self.mark["busy"][0, thread] = subject
        self.mark["since"][0, thread] = self.mark["beat"][0] - wall
        self.mark["times"][0, thread] = 0.0, wall - seconds

    def end(
        self, most: float = 30.0, beats: bool = False, waits: float = 0.0
    ) -> tuple[str, int | None, int] | None:
        """Let time pass until the actor is to be ended. Returns the cause, the subject
        and the rounded seconds.

        With `beats`, what it is busy with takes no longer meanwhile.
        """
        began = self.now
        while self.now < began + most:
            self.now += 0.2
            self.mark["beat"] += BEAT_SECONDS * beats
            self.mark["since"] += BEAT_SECONDS * beats
            self.times = (self.times[0] + 0.2 - waits, self.times[1] + waits)
            verdict = self.watch.look()
            if verdict is not None:
                cause, works = verdict
                subject = works[0].subject if works else None
                return cause, subject, round(self.now - began)
        return None


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_one_with_a_heartbeat_goes_on(scene: Scene) -> None:
    scene.busy(FIRST, 1.9)
    scene.busy(LOAD, 9.9)
    assert scene.end(beats=True) is None


@pytest.mark.parametrize("thread", [FIRST, LOAD, None])
def test_a_frozen_one_is_ended_after_five_seconds(
    scene: Scene, thread: int | None
) -> None:
    scene.state = "T"
    if thread is not None:
        scene.busy(thread, 1.0)
    assert scene.end() == ("frozen", None, 5)


def test_a_starved_one_goes_on(scene: Scene) -> None:
    scene.state = "R"
    scene.busy(FIRST, 1.0)
    assert scene.end(waits=0.2) is None
    scene.times = (0.0, 0.0)
    for _ in range(100):  # it gets no CPU at all
        scene.now += 0.2
        assert scene.watch.look() is None


def test_times_that_cannot_be_read_end_no_actor(scene: Scene) -> None:
    scene.times = (5.0, 100.0)
    scene.now += 0.2
    scene.watch.look()
    scene.times = (0.0, 0.0)  # no descriptor is free
    scene.now += 0.2
    assert scene.watch.look() is None
    assert scene.watch.silent < 1


def test_time_in_which_the_supervisor_was_late_does_not_count(scene: Scene) -> None:
    scene.now += 100
    assert scene.watch.look() is None
    assert scene.watch.silent < 1


def test_the_last_one_that_began_holds_the_lock(scene: Scene) -> None:
    scene.busy(FIRST, 1.0)
    scene.busy(SECOND, 0.1, subject=4)
    assert scene.end() == ("fill", 4, 2)


def test_the_last_one_is_known_before_its_first_heartbeat(scene: Scene) -> None:
    scene.busy(FIRST, -0.1)
    scene.busy(LOAD, -0.2, subject=4)
    assert scene.end() == ("load", 4, 5)


def test_a_load_that_holds_the_lock_is_ended_early(scene: Scene) -> None:
    scene.busy(LOAD, 0.0)
    assert scene.end() == ("load", 3, 5)


@pytest.mark.parametrize(
    ("seconds", "wall", "ends"),
    [(2.1, 2.1, True), (1.9, 8.0, False)],
    ids=["runs", "waits for a CPU"],
)
def test_a_fill_has_its_own_limit(
    scene: Scene, seconds: float, wall: float, ends: bool
) -> None:
    scene.busy(FIRST, seconds, wall)
    assert scene.end(most=1.0, beats=True) == (("fill", 3, 0) if ends else None)


@pytest.mark.parametrize(
    ("seconds", "wall", "ends"),
    [(10.1, 10.1, True), (9.0, 59.0, False), (9.0, 61.0, True)],
)
def test_a_load_has_two_limits(
    scene: Scene, seconds: float, wall: float, ends: bool
) -> None:
    scene.busy(LOAD, seconds, wall)
    assert scene.end(most=1.0, beats=True) == (("load", 3, 0) if ends else None)


def test_an_import_has_a_longer_limit(scene: Scene) -> None:
    scene.busy(IMPORT, 59.0)
    assert scene.end(most=1.0, beats=True) is None
    scene.busy(IMPORT, 61.0)
    assert scene.end(beats=True) == ("import", 3, 0)


def test_one_that_begins_with_nothing_is_ended(scene: Scene) -> None:
    scene.pair.table.target[0] = 7
    assert scene.end(beats=True) == ("transfer", None, 5)


def test_what_the_engine_has_not_sent_is_no_fault_of_the_actor(scene: Scene) -> None:
    scene.pair.table.target[0] = ~7
    scene.pair.connection.requests.append(Free(0))
    assert scene.end(beats=True) is None


def test_the_largest_part_of_the_memory_is_that_of_the_longest(scene: Scene) -> None:
    scene.memory = 1001
    scene.busy(FIRST, 0.1)
    scene.busy(SECOND, 0.2, subject=4)
    assert scene.end(beats=True) == ("memory", 4, 0)


def test_one_on_another_node_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, is_remote=True)
    scene.busy(FIRST, 1.0)
    assert scene.end() == ("frozen", None, 15)
