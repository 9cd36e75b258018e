"""Actors that use too much memory, at once or slowly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, gone, until

from actors import RayPool
from guided.errors import BackendError

MIB = 1 << 20
LIMIT = 512 * MIB


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
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


def test_a_grammar_that_eats_memory_when_loaded_ends_its_sequence(driven: DrivenPool) -> None:
    sound = driven.open("sound", number=4)
    driven.go_on(sound)
    (eater,) = driven.open("eat@load=800")
    driven.go_on([*sound, eater], 3)
    assert set(driven.errors) == {eater}
