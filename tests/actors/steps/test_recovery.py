"""What becomes of sequences when an actor ends, with actors on threads."""

from __future__ import annotations

import pytest
from step_driver import WAIT
from thread_cluster import Cluster, until

from actors.channel import Transport
from guided.errors import MaskTimeout, WorkerDied


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_a_dead_actors_sequences_are_lost_once_and_the_others_continue(transport: Transport, shared: bool) -> None:
    cluster = Cluster(transport, shared=shared)
    cluster.open(1, 2, 3, 4)
    assert cluster.step((1, ""), (2, ""), (3, ""), (4, "")) == ["ax"] * 4
    cluster.end(0)
    assert set(cluster.dispatcher.failures()) == {1, 3}
    assert cluster.dispatcher.failures() == {}
    rows = cluster.step((1, "a"), (2, "a"), (3, "a"), (4, "a"))
    assert [row if isinstance(row, str) else type(row) for row in rows] == [WorkerDied, "b", WorkerDied, "b"]
    cluster.open(5)
    cluster.step((5, ""))
    assert cluster.where(5) == 1
    cluster.close()


def test_a_death_ends_the_wait_for_its_rows(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    assert cluster.slow.reached.wait(WAIT)
    cluster.end(cluster.where(1))
    (error,) = cluster.collect()
    assert isinstance(error, WorkerDied)


def test_a_sequence_that_had_no_mask_from_a_dead_actor_is_placed_again(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.open(3)
    cluster.submit((1, "a"), (2, ""), (3, "a"))  # 3 waits behind 1
    assert cluster.slow.reached.wait(WAIT)
    assert cluster.where(1) == cluster.where(3)
    cluster.end(cluster.where(1))
    error, *others = cluster.collect()
    assert isinstance(error, WorkerDied)
    assert not error.retryable
    assert others == ["ax", "b"]
    assert set(cluster.dispatcher.failures()) == {1}


def test_a_hang_loses_the_sequence_it_hangs_in_and_moves_the_others(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.step((1, ""), (2, ""))
    cluster.open(3, 4, parent=1)
    assert cluster.step((3, ""), (4, "")) == ["ax", "ax"]
    cluster.submit((1, "a"), (3, "a"), (4, "a"), (2, "a"))
    assert cluster.slow.reached.wait(WAIT)
    cluster.end(cluster.where(1), hung=True)
    error, *others = cluster.collect()
    assert isinstance(error, MaskTimeout)
    assert others == ["b"] * 3, "they were opened again within the step"
    assert cluster.dispatcher.replays == 2
    assert set(cluster.dispatcher.failures()) == {1}
    assert cluster.where(3) == cluster.where(4) == 1


def test_with_replays_the_sequence_that_was_being_filled_is_tried_alone(transport: Transport) -> None:
    cluster = Cluster(transport, number=3, max_replays=1)
    cluster.open(1, grammar="slow")
    cluster.open(2, 3)
    cluster.step((1, ""), (2, ""), (3, ""))
    cluster.submit((1, "a"), (2, "a"), (3, "a"))
    assert cluster.slow.reached.wait(WAIT)
    cluster.slow.reached.clear()
    cluster.end(cluster.where(1))
    late, *others = cluster.collect(5.0, 0.1)
    assert late == "late"
    assert set(others) <= {"b", "late"}, "a mask is late if its sequence was moved away for the suspect"
    assert cluster.slow.reached.wait(WAIT)
    assert cluster.on(cluster.where(1)) == {1}, "no other sequence is there"
    cluster.slow.release.set()
    settled: set[int] = set()
    until(lambda: settled.update(cluster.dispatcher.settled(0.05)) or 1 in settled)
    assert cluster.step((1, "a"), (2, "a"), (3, "a")) == ["b"] * 3
    assert cluster.dispatcher.failures() == {}
    cluster.close()


def test_a_suspect_that_is_late_is_asked_for_again_once_a_worker_is_up(transport: Transport) -> None:
    cluster = Cluster(transport, number=1, max_replays=1, mask_limit=4.0)
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    assert cluster.slow.reached.wait(WAIT)
    cluster.end(0)
    assert cluster.collect(0.05) == ["late"]
    cluster.slow.release.set()
    cluster.join(1)
    cluster.join(2)
    cluster.open(2)
    assert cluster.step((2, "")) == ["ax"], "a step without the suspect"
    assert cluster.dispatcher.settled(WAIT) == [1]
    assert cluster.step((1, "a")) == ["b"]
    cluster.close()
