"""The pool's actors follow the load: 1, then 3, then 1 again, and no sequence moves or ends for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, gone, until

from actors import RayPool

SLOW = ("sleep@fill=0.01", "length=100000")


@pytest.fixture
def driven(local_ray: None) -> Iterator[DrivenPool]:
    pool = RayPool(BYTES, num_actors=1, max_actors=3, scale_down_seconds=1.0)
    yield DrivenPool(pool)
    pool.shutdown()


def states(driven: DrivenPool) -> list[str]:
    return sorted(worker.state for worker in driven.pool.status().workers)


def stepping(driven: DrivenPool, sequences: list[int], true: Callable[[], bool], pause: float = 0.0) -> None:
    """Run steps until a condition is true."""

    def after_a_step() -> bool:
        driven.step(sequences)
        time.sleep(pause)
        return true()

    until(after_a_step)


def test_the_pool_grows_and_shrinks_and_no_sequence_moves(driven: DrivenPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="actors")
    assert states(driven) == ["stopped", "stopped", "up"]
    streams = driven.open(*SLOW, number=4)
    homes = {each: next(iter(driven.pids)) for each in streams}
    for number in 2, 3:
        stepping(driven, streams, lambda number=number: states(driven).count("up") == number)
        known = set(homes.values())
        new = driven.open(*SLOW, number=4)
        driven.go_on(streams + new, 3)
        assert {driven.pid_of(each) for each in new}.isdisjoint(known), "new sequences go to the new actor"
        homes |= {each: driven.pid_of(each) for each in new}
        streams += new
    assert len(set(homes.values())) == 3
    assert {each: driven.pid_of(each) for each in streams} == homes, "live sequences stay"

    # One sequence each on two actors is little to do. The third actor ends, and one of the two takes no new sequences.
    alive = [streams[0], streams[4]]
    driven.pool.free([each for each in streams if each not in alive])
    stepping(driven, alive, lambda: states(driven) == ["draining", "stopped", "up"], pause=0.1)
    gone(homes[streams[8]])
    (draining,) = [worker for worker in driven.pool.status().workers if worker.state == "draining"]
    assert draining.pid is not None
    later = driven.open("length=100000", number=3)
    driven.go_on([*alive, *later], 3)
    assert [driven.pid_of(each) for each in alive] == [homes[each] for each in alive]
    assert draining.pid not in {driven.pid_of(each) for each in later}
    driven.pool.free([each for each in alive if homes[each] == draining.pid])
    gone(draining.pid)
    until(lambda: states(driven) == ["stopped", "stopped", "up"])
    driven.go_on(later, 3)
    assert not driven.errors

    status = driven.pool.status()
    assert status.replays == 0
    assert [dict(worker.ends) for worker in status.workers if worker.ends] == [{"drained": 1}] * 2
    assert not any(worker.restarts for worker in status.workers)
    assert "2 mask actors are wanted instead of 1" in caplog.text
    assert "was not needed any more" in caplog.text
