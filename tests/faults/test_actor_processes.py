"""Actors that crash, are killed or stopped at any time. With the pool's defaults:
nothing is replayed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, freeze, gone, placement, until
from faulty_backend import faulty

from actors import RayPool
from guided.errors import GrammarLoadTimeout, MaskTimeout, WorkerDied


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(BYTES, num_actors=2, mask_limit=2.0).started()
    yield pool
    pool.shutdown()


@pytest.fixture
def driven(pool: RayPool) -> Iterator[DrivenPool]:
    driven = DrivenPool(pool)
    until(driven.all_up)
    yield driven
    driven.close()


@pytest.mark.parametrize("ending", ["segfault", "exit"])
def test_a_crash_in_mid_fill_ends_the_sequences_with_a_matcher_there(
    driven: DrivenPool, ending: str
) -> None:
    sound = driven.open("sound", number=5)
    (culprit,) = driven.open(f"{ending}@fill:2")
    driven.go_on([*sound, culprit], 2)
    there, pids = driven.neighbours(culprit, sound), driven.pids
    assert 0 < len(there) < len(sound)
    driven.go_on([*sound, culprit], 3)
    assert set(driven.errors) == {culprit, *there}
    assert all(isinstance(error, WorkerDied) for error in driven.errors.values())
    marked = {each for each, error in driven.errors.items() if not error.retryable}
    assert culprit in marked
    assert len(marked) <= 2, "the other thread may have been in a row too"
    until(driven.all_up)
    assert len(driven.pids & pids) == 1
    again = driven.open("sound", number=4)
    driven.go_on(again)
    assert not set(again) & set(driven.errors)


@pytest.mark.parametrize("fault", ["sleep@fill:1=1000", "hold@fill:1"])
def test_a_mask_that_never_comes_ends_its_own_sequence_and_the_actor(
    driven: DrivenPool, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    reached = tmp_path / "reached"
    sound = driven.open("sound", number=5)
    (culprit,) = driven.open(fault, f"touch={reached}")
    driven.go_on([*sound, culprit])
    pid = driven.pid_of(culprit)
    assert driven.neighbours(culprit, sound)
    driven.step([*sound, culprit], deadline=0.05)
    until(reached.exists)
    driven.go_on([*sound, culprit], 3)
    assert set(driven.errors) == {culprit}
    assert isinstance(driven.errors[culprit], MaskTimeout)
    until(lambda: not psutil.pid_exists(pid))
    assert (
        f"sequence {culprit} of request request, constraint {faulty(fault, f'touch={reached}').key}"
        in caplog.text
    )


@pytest.mark.parametrize("place", ["load", "fill:1"])
def test_an_actor_that_is_frozen_costs_no_sequence(
    driven: DrivenPool, tmp_path: Path, place: str
) -> None:
    sequences = driven.open("sound", number=5)
    driven.go_on(sequences)
    pids = driven.pids
    sequences += driven.open(f"freeze@{place}", f"once={tmp_path / 'frozen'}")
    started = time.monotonic()
    driven.go_on(sequences, 2)
    assert time.monotonic() - started < 15, "5 s, on a quiet machine"
    assert not driven.errors
    assert len(pids & driven.pids) <= 1


def test_what_freezes_every_actor_is_opened_twice(driven: DrivenPool) -> None:
    sound = driven.open("sound", number=4)
    driven.go_on(sound, 2)
    (culprit,) = driven.open("freeze@load")
    # alone: what an actor is busy with when it freezes counts as the cause, too
    driven.go_on([culprit], 2)
    driven.go_on(sound, 2)
    assert set(driven.errors) == {culprit}
    assert isinstance(driven.errors[culprit], WorkerDied)


@pytest.mark.parametrize("fault", ["sleep@load=1000", "hold@load"])
def test_a_grammar_that_is_never_loaded_ends_what_waits_for_it(
    driven: DrivenPool, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("actors.watch.LOAD_SECONDS", 2.0)
    sound = driven.open("sound", number=4)
    driven.go_on(sound)
    waiting = driven.open(fault, number=3)
    assert driven.step(sound, deadline=5.0) == set(sound), "the others go on"
    driven.go_on([*sound, *waiting], 3)
    assert set(driven.errors) == set(waiting)
    assert {type(error) for error in driven.errors.values()} == {GrammarLoadTimeout}


def test_a_large_grammar_delays_no_other_row(driven: DrivenPool) -> None:
    sound = driven.open("sound length=500", number=4)
    driven.go_on(sound, 5)
    pids = driven.pids
    large = driven.open("sound dump=64")
    late = 0
    while not driven.tokens[large[0]]:
        late += len(set(sound) - driven.step([*sound, *large], deadline=1.0))
    assert late == 0
    assert driven.pids == pids


def test_an_idle_actors_death_ends_its_sequences(driven: DrivenPool) -> None:
    sequences = driven.open("sound", number=4)
    driven.go_on(sequences)
    victim, lost = next(iter(placement(driven.pool).items()))
    (before,) = [
        worker for worker in driven.pool.status().workers if worker.pid == victim
    ]
    os.kill(victim, signal.SIGKILL)
    gone(victim)
    driven.go_on(sequences, 2)
    assert set(driven.errors) == lost
    until(driven.all_up)
    after = driven.pool.status().workers[before.index]
    assert (after.incarnation, after.restarts) == (
        before.incarnation + 1,
        before.restarts + 1,
    )


def test_an_actor_frozen_outside_of_a_mask_costs_no_sequence(
    driven: DrivenPool,
) -> None:
    sequences = driven.open("sound", number=6)
    driven.go_on(sequences)
    frozen = driven.pid_of(sequences[0])
    freeze(frozen)
    driven.go_on(sequences, 2)
    assert not driven.errors
    until(lambda: not psutil.pid_exists(frozen))


def test_an_actor_that_does_not_start_is_down_and_others_go_on(
    driven: DrivenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = driven.open("sound length=1000", number=4)
    driven.go_on(sequences)
    pid = driven.pid_of(sequences[0])
    (down,) = [
        worker.index for worker in driven.pool.status().workers if worker.pid == pid
    ]
    staying = [each for each in sequences if driven.pid_of(each) != pid]
    monkeypatch.setattr("actors.ray_pool.version", lambda _: "another")
    os.kill(pid, signal.SIGKILL)

    def state() -> str:
        driven.go_on(staying)
        return driven.pool.status().workers[down].state

    until(lambda: state() == "down")
    assert driven.pool.status().healthy
    assert "install the same one" in str(driven.pool.status().workers[down].last_end)
    assert not set(driven.errors) & set(staying)
    monkeypatch.undo()
    until(driven.all_up)  # it is tried again
