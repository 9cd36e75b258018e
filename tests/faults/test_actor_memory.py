"""Actors that use too much memory, at once or slowly."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, gone, until

from actors import RayPool
from actors.supervision import supervisor
from guided.errors import BackendError

MIB = 1 << 20
LIMIT = 512 * MIB


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "_CRASH_LOOP_SECONDS", 0.0)
        pool = RayPool(BYTES, num_actors=2, actor_memory_bytes=LIMIT, mask_limit=60.0)
        yield pool
        pool.shutdown()


@pytest.fixture
def driven(pool: RayPool) -> Iterator[DrivenPool]:
    driven = DrivenPool(pool)
    until(driven.all_up)
    yield driven
    driven.close()


def test_a_mask_that_eats_memory_ends_its_own_sequence_and_the_actor(
    driven: DrivenPool, caplog: pytest.LogCaptureFixture
) -> None:
    sound = driven.open("sound", number=5)
    (eater,) = driven.open("eat@fill:2=800")  # and then it would wait without end
    driven.go_on([*sound, eater], 2)
    pid = driven.pid_of(eater)
    assert driven.neighbours(eater, sound)
    driven.go_on([*sound, eater], 4)
    assert set(driven.errors) == {eater}
    assert isinstance(driven.errors[eater], BackendError)
    assert "512 MiB of memory" in str(driven.errors[eater])
    assert str(pid) in caplog.text
    gone(pid)


def test_a_grammar_that_eats_memory_while_it_is_loaded_ends_no_sequence(driven: DrivenPool, tmp_path: object) -> None:
    sound = driven.open("sound", number=4)
    driven.go_on(sound)
    (late,) = driven.open("eat@load=800", f"once={tmp_path}/once")
    driven.go_on([*sound, late], 3)
    assert not driven.errors


def test_an_actor_that_leaks_is_replaced_without_effect_on_requests(
    driven: DrivenPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sound = driven.open("sound length=1000", number=3)
    (leaky,) = driven.open("leak@fill=8 length=1000")
    driven.go_on([*sound, leaky])
    replaced: set[int] = set()
    for _ in range(2):
        pid = driven.pid_of(leaky)
        while leaky in driven.pool.placement().get(pid, ()):
            driven.go_on([leaky])  # slowly, so that the supervisor measures in between
            driven.go_on(sound, 3)
        driven.go_on([*sound, leaky], 2)
        gone(pid)
        until(driven.all_up)
        driven.go_on(sound)  # the pool takes notice of it
        replaced.add(pid)
    driven.go_on([*sound, leaky], 3)
    assert len(replaced) == 2
    assert not driven.errors
    assert driven.pool.failures() == {}
    assert caplog.text.count("had grown and is replaced") == 2
    assert "restart" not in caplog.text
