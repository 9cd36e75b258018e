"""ScalingPolicy: the number of actors follows the load, within its limits, and settles. No actor, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from actors.steps.dispatcher import Load
from actors.supervision.scaling import ScalingPolicy

PATIENCE = 5.0


@dataclass
class Pool:
    """Actors that are up at once, and steps that wait for masks as soon as the actors have no time left."""

    policy: ScalingPolicy
    load: Load = field(default_factory=Load)
    now: float = 100.0

    def run(self, offered: float, seconds: int, up: int | None = None) -> list[int]:
        """Have steps ask for `offered` seconds of masks a second. Returns how many actors were wanted each second."""
        wanted: list[int] = []
        for _ in range(seconds):
            actors = self.policy.wanted if up is None else up
            is_behind = offered > 0.9 * actors
            self.now += 1.0
            self.load.rows += 100
            self.load.mask_seconds += min(offered, actors)
            self.load.exposed_seconds += 0.3 * is_behind
            wanted.append(self.policy.update(self.load, actors, self.now))
        return wanted


loads = st.floats(0.0, 20.0)


@given(st.integers(1, 4), st.integers(0, 8), st.lists(loads, min_size=1, max_size=8))
def test_the_number_stays_within_its_limits_and_settles(least: int, more: int, offered: list[float]) -> None:
    pool = Pool(ScalingPolicy(least, least + more, least, PATIENCE))
    for each in offered:
        wanted = pool.run(each, 200)
        assert all(least <= number <= least + more for number in wanted)
        assert len(set(wanted[-50:])) == 1, "no change without a change of the load"
        assert each <= wanted[-1] or wanted[-1] == least + more, "enough, or as many as there may be"
        assert wanted[-1] == least or each > 0.4 * (wanted[-1] - 1) - 1e-6, "not more than twice as many as needed"


@given(st.integers(1, 3), st.floats(3.5, 20.0))
def test_no_more_actors_are_asked_for_until_those_are_up(start: int, offered: float) -> None:
    pool = Pool(ScalingPolicy(1, 16, start, PATIENCE))
    first = pool.run(offered, 3)[-1]
    assert first > start
    assert set(pool.run(offered, 60, up=start)) == {first}


def test_an_actor_is_given_up_only_after_a_while_and_one_at_a_time() -> None:
    pool = Pool(ScalingPolicy(1, 8, 4, PATIENCE))
    assert pool.run(0.1, 14) == [4] * 6 + [3] * 5 + [2] * 3
    pool.run(1.8, 2)  # both are needed after all, and the measurement begins again
    assert pool.run(0.1, 6) == [2] * 5 + [1]
    assert set(pool.run(0.0, 30)) == {1}


def test_waiting_that_is_not_the_actors_fault_needs_no_more_of_them() -> None:
    """The network is slow, or other processes have the cores."""
    policy = ScalingPolicy(1, 8, 1, PATIENCE)
    policy.update(Load(), 1, 1.0)
    assert policy.update(Load(rows=100, exposed_seconds=0.8, mask_seconds=0.1), 1, 2.0) == 1


def test_late_rows_of_busy_actors_and_rows_without_a_slot_need_more() -> None:
    for load in Load(rows=100, late=5, mask_seconds=0.9), Load(rows=100, unplaced=1):
        policy = ScalingPolicy(1, 8, 1, PATIENCE)
        policy.update(Load(), 1, 1.0)
        assert policy.update(load, 1, 2.0) == 2
        assert "of 1 actors busy" in policy.reason
