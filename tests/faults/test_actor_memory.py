"""Actors that use too much memory, at once or slowly."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import psutil
import pytest
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, gone, until
from ray_clusters import run

from actors import RayPool
from actors.processes import machine_bytes, memory_limit, resident_bytes
from guided.errors import BackendError

MIB = 1 << 20
LIMIT = 512 * MIB
EATER = """
from actors.processes import limit_memory
limit_memory(200 << 20)
eaten = []
try:
    while len(eaten) < 100:
        eaten.append(bytearray(b"x" * (16 << 20)))
except MemoryError:
    print(16 * len(eaten))
"""


def test_beyond_the_limit_and_some_slack_no_memory_is_to_be_had() -> None:
    assert 200 < int(run(EATER)) < 200 + 1024


@pytest.mark.parametrize(
    ("wanted", "hard"),
    [
        (None, min(2048 * MIB, machine_bytes() // 2)),
        (300 * MIB, 300 * MIB),
        (1 << 60, machine_bytes()),
    ],
)
def test_no_limit_is_more_than_the_machine_has(wanted: int | None, hard: int) -> None:
    assert memory_limit(wanted) == hard


def test_what_cannot_be_read_is_not_over_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, there is no free descriptor to read it with."""
    process = psutil.Process()
    assert resident_bytes(process) > MIB

    def no_descriptor() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(process, "memory_info", no_descriptor)
    assert resident_bytes(process) == 0


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(
        BYTES, num_actors=2, actor_memory_bytes=LIMIT, mask_limit=60.0
    ).started()
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
