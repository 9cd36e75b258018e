"""Steps, placement and slots, with actors on threads: what the engine's thread does, without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from step_driver import WAIT, all_ready, grammar_named, outcomes
from thread_actor import close_all
from thread_cluster import Cluster, ids, until

from actors.channel import Transport
from actors.steps.placement import WorkerRetiring
from actors.steps.protocol import Failed, Filled
from guided.errors import GuidedError, MaskTimeout, PoolUnavailable, TokenRejected, WorkerDied, to_wire

# placement


def test_new_sequences_go_where_the_fewest_are_and_stay_there(cluster: Cluster) -> None:
    cluster.open(1, 2, 3, 4)
    cluster.step((1, ""), (2, ""), (3, ""), (4, ""))
    assert [cluster.where(number) for number in (1, 2, 3, 4)] == [0, 1, 0, 1]
    cluster.dispatcher.free([2, 4])
    cluster.open(5, 6)
    for text in ("", "a", "ab"):
        assert all_ready(cluster.step((1, text), (5, text), (6, text)))
        assert [cluster.where(number) for number in (1, 3, 5, 6)] == [0, 0, 1, 1]


def test_a_sequence_of_a_grammar_with_a_slow_first_mask_is_filled_after_the_others(cluster: Cluster) -> None:
    cluster.end(1)
    slow = replace(grammar_named("slow"), mask_seconds=0.5)
    cluster.open(1, grammar=slow)
    cluster.open(2)
    cluster.submit((1, "a"), (2, ""))
    assert cluster.slow.reached.wait(WAIT)
    assert cluster.collect(timeout=0.05) == ["late", "ax"]
    cluster.slow.release.set()


def test_a_fork_goes_to_its_parent_however_busy_that_is(cluster: Cluster) -> None:
    cluster.open(1, 2)
    cluster.step((1, ""), (2, ""))
    for fork in (3, 4, 5):
        cluster.open(fork, parent=1)
    cluster.step((3, ""), (4, ""), (5, ""))
    assert {cluster.where(number) for number in (1, 3, 4, 5)} == {0}


def test_an_actor_that_lacks_the_grammar_gets_no_sequence_of_it(cluster: Cluster) -> None:
    cluster.actors[0].pair.installed.discard("fast")
    cluster.open(1, 2)
    cluster.step((1, ""), (2, ""))
    assert {cluster.where(1), cluster.where(2)} == {1}


def test_without_an_actor_that_has_the_grammar_a_sequence_waits_for_one(cluster: Cluster) -> None:
    for actor in cluster.actors:
        actor.pair.installed.discard("fast")
    cluster.open(1)
    assert cluster.step((1, ""), timeout=0.05) == ["late"]
    assert cluster.dispatcher.settled(0.05) == []
    threading.Timer(0.1, cluster.actors[1].pair.installed.add, ["fast"]).start()
    assert cluster.dispatcher.settled(WAIT) == [1]
    assert cluster.step((1, ""), timeout=0.0) == ["ax"]
    assert cluster.where(1) == 1


def test_an_actor_that_comes_up_ends_the_wait_of_a_step(cluster: Cluster) -> None:
    cluster.end(0)
    cluster.end(1)
    cluster.open(1, 2)
    cluster.submit((1, ""), (2, ""))
    threading.Timer(0.1, cluster.join, [2]).start()
    assert cluster.collect() == ["ax", "ax"]


def test_without_an_actor_sequences_wait_and_then_fail(transport: Transport) -> None:
    cluster = Cluster(transport, number=0, pool_wait=0.3)
    cluster.open(1)
    started = time.monotonic()
    assert cluster.step((1, ""), timeout=0.0) == ["late"]
    assert cluster.dispatcher.settled(0.01) == []
    assert cluster.dispatcher.settled(WAIT) == [1]
    assert time.monotonic() - started >= 0.3
    (error,) = cluster.step((1, ""))
    assert isinstance(error, PoolUnavailable)
    cluster.close()


def test_a_sequence_of_a_rejected_grammar_fails_with_the_reason(transport: Transport) -> None:
    cluster = Cluster(transport)
    cluster.end(0)
    cluster.end(1)
    cluster.open(1)
    assert cluster.step((1, ""), timeout=0.0) == ["late"]
    assert cluster.dispatcher.settled() == []
    assert cluster.dispatcher.settled() == []
    cluster.rejected["fast"] = WorkerDied("loading it ended its worker")
    assert cluster.dispatcher.settled(WAIT) == [1]
    assert cluster.step((1, "")) == [cluster.rejected["fast"]]
    cluster.close()


def test_a_retiring_actor_is_emptied(cluster: Cluster) -> None:
    cluster.open(1, 2, 3)
    cluster.step((1, ""), (2, ""), (3, ""))
    cluster.actors[0].connection.retiring = True
    cluster.dispatcher.announce(WorkerRetiring(cluster.actors[0].connection))
    assert cluster.step((1, "a"), (2, "a"), (3, "a")) == ["b"] * 3
    assert cluster.on(0) == set()
    assert cluster.on(1) == {1, 2, 3}


# slots


def test_a_slot_is_used_again_only_after_the_worker_has_freed_it(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    assert cluster.step((1, "a"), timeout=0.05) == ["late"]
    connection = cluster.actors[0].connection
    (slot,) = connection.sequences
    cluster.dispatcher.free([1])
    for number in range(2, 9):
        cluster.open(number)
        cluster.step((number, ""), timeout=0.0)
        assert slot not in connection.sequences
    cluster.slow.release.set()
    until(lambda: bool(connection.table.ready[slot] < 0))


def test_more_sequences_than_slots_wait_for_a_slot(transport: Transport) -> None:
    cluster = Cluster(transport, number=1, slots=3)
    cluster.open(1, 2, 3, 4, 5)
    assert cluster.step(*((number, "") for number in (1, 2, 3, 4, 5)), timeout=0.1) == ["ax"] * 3 + ["late"] * 2
    cluster.dispatcher.free([1, 3])
    until(lambda: set(cluster.dispatcher.settled(0.05)) == {4, 5})
    assert cluster.step((4, ""), (5, "")) == ["ax", "ax"]
    cluster.close()


def test_frees_reach_the_worker_with_the_next_step_or_at_once(cluster: Cluster) -> None:
    cluster.open(1, 2, 3)
    cluster.step((1, ""), (2, ""), (3, ""))
    worker, other = cluster.actors[0].worker, cluster.actors[1].worker
    assert (worker.num_open, other.num_open) == (2, 1)
    cluster.dispatcher.free([1])
    cluster.step((3, "a"))
    assert worker.num_open == 1
    cluster.dispatcher.free([2, 3])
    until(lambda: worker.num_open == other.num_open == 0)


def test_masks_of_an_actor_that_is_gone_can_be_read_until_the_next_step(cluster: Cluster) -> None:
    cluster.open(1, 2)
    cluster.submit((1, "a"), (2, "x"))
    found = cluster.dispatcher.collect(WAIT)
    cluster.end(1)
    cluster.dispatcher.failures()
    assert outcomes(found, 2) == ["b", "y"]


# late rows


def test_a_late_row_is_kept_and_its_neighbours_continue(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    assert cluster.step((1, ""), (2, "")) == ["ax", "ax"]
    assert cluster.step((1, "a"), (2, "a"), timeout=0.1) == ["late", "b"]
    assert cluster.step((2, "ab")) == ["cd"]
    cluster.slow.release.set()
    assert cluster.step((1, "a")) == ["b"]
    assert cluster.slow.fills_at[1] == 1, "a mask that is under way is not asked for again"


def test_a_late_mask_that_came_between_two_steps_is_there_at_once(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    assert cluster.step((1, "a"), timeout=0.05) == ["late"]
    assert cluster.dispatcher.settled(0.05) == []
    threading.Timer(0.1, cluster.slow.release.set).start()
    assert cluster.dispatcher.settled(WAIT) == [1]
    assert cluster.dispatcher.settled() == [1], "until it is submitted again"
    assert cluster.step((1, "a"), timeout=0.0) == ["b"]
    assert cluster.dispatcher.settled() == []


def test_patience_starts_with_the_first_decided_row(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.submit((1, "a"), (2, "a"))
    assert cluster.collect(WAIT, 0.0) == ["late", "b"]
    cluster.submit((1, "a"))
    threading.Timer(0.2, cluster.slow.release.set).start()
    assert cluster.collect(WAIT, 0.0) == ["b"], "no other row could be sampled"


def test_a_late_mask_is_not_that_of_a_later_output(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    assert cluster.step((1, "a"), timeout=0.05) == ["late"]
    cluster.submit((1, "ab"))
    cluster.slow.release.set()
    assert cluster.collect() == ["cd"]
    cluster.slow.release.clear()
    cluster.dispatcher.rollback(1, 0)
    assert cluster.step((1, "x"), timeout=0.05) == ["late"]
    cluster.dispatcher.rollback(1, 0)
    cluster.submit((1, "a"))
    cluster.slow.release.set()
    assert cluster.collect() == ["b"], "of two outputs of one length, the later one"


def test_a_mask_that_never_comes_fails_its_sequence(transport: Transport) -> None:
    cluster = Cluster(transport, mask_limit=0.1)
    cluster.open(1, 3, grammar="slow")
    cluster.open(2)
    error, mask = cluster.step((1, "a"), (2, "a"), timeout=None)
    assert isinstance(error, MaskTimeout)
    assert mask == "b"
    assert cluster.step((3, "a"), timeout=0.0) == ["late"]
    assert cluster.dispatcher.settled(WAIT) == [3]
    (error,) = cluster.step((3, "a"))
    assert isinstance(error, MaskTimeout)
    cluster.close()


def test_a_sequence_behind_a_mask_that_never_comes_may_be_tried_again(transport: Transport) -> None:
    """The supervisor is late, or its signal is."""
    cluster = Cluster(transport, number=1, mask_limit=0.1)
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.step((1, ""), (2, ""))
    culprit, innocent = cluster.step((1, "a"), (2, "a"), timeout=None)
    assert isinstance(culprit, MaskTimeout)
    assert isinstance(innocent, MaskTimeout)
    assert (culprit.retryable, innocent.retryable) == (False, True)
    cluster.close()


@pytest.mark.parametrize("waits", ["in settled", "in a step"])
def test_the_wait_for_a_worker_does_not_count_as_mask_time(transport: Transport, waits: str) -> None:
    cluster = Cluster(transport, number=0, mask_limit=1.0)
    cluster.open(1)
    cluster.open(2, grammar="slow")
    assert cluster.step((1, ""), (2, "a"), timeout=0.0) == ["late", "late"]
    time.sleep(1.6)
    cluster.join(0)
    if waits == "in settled":
        assert cluster.dispatcher.settled(WAIT) == [1]
    assert cluster.step((1, ""), (2, "a"), timeout=0.05) == ["ax", "late"]
    cluster.slow.release.set()
    assert cluster.step((2, "a")) == ["b"]
    cluster.close()


@pytest.mark.parametrize("hung", [False, True])
def test_a_late_row_is_settled_if_its_actor_is_gone(cluster: Cluster, hung: bool) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.open(3, parent=1)
    assert cluster.step((1, ""), (2, ""), (3, "")) == ["ax"] * 3
    assert cluster.step((3, "a")) == ["b"]
    slow, behind = cluster.step((1, "a"), (3, "ab"), timeout=0.05)
    assert slow == "late"
    if behind == "late":  # it is moved away from the straggler at half of the timeout
        assert cluster.dispatcher.settled(WAIT) == [3]
        (behind,) = cluster.step((3, "ab"))
    assert behind == "cd"
    threading.Timer(0.1, cluster.end, [cluster.where(1), hung]).start()
    assert cluster.dispatcher.settled(WAIT) == [1]
    (error,) = cluster.step((1, "a"), timeout=0.0)
    assert isinstance(error, GuidedError)
    assert set(cluster.dispatcher.failures()) == {1}
    assert cluster.step((3, "ab")) == ["cd"]


def test_known_slow_slots_are_filled_last(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.open(3, parent=1)
    threading.Timer(0.05, cluster.slow.release.set).start()
    assert cluster.step((1, "a"), (2, ""), (3, "a")) == ["b", "ax", "b"]
    cluster.slow.release.clear()
    cluster.slow.slow_at = 2
    cluster.submit((1, "ab"), (3, "ab"))
    assert cluster.collect(WAIT, 0.1) == ["late", "cd"], "the quick one did not wait behind the slow one"


def test_a_rollback_beyond_what_was_sent_loses_no_token(cluster: Cluster) -> None:
    cluster.open(1)
    assert cluster.step((1, "")) == ["ax"]
    cluster.dispatcher.rollback(1, 2)
    assert cluster.step((1, "abc")) == ["."]


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_a_worker_that_was_idle_for_long_is_not_overdue_when_it_is_asked(transport: Transport, shared: bool) -> None:
    cluster = Cluster(transport, number=1, shared=shared)
    worker = cluster.actors[0].connection
    cluster.open(1, 2)
    cluster.open(3, grammar="slow")
    cluster.step((1, ""), (2, ""), (3, ""))
    time.sleep(0.3)
    cluster.dispatcher.free([2])
    cluster.step()  # a frame that only frees
    time.sleep(0.3)
    assert cluster.step((3, "a"), timeout=0.02) == ["late"]
    assert 0.0 < worker.stuck_seconds(time.monotonic()) < 0.2
    assert not worker.overdue(0.2)
    cluster.close()


# stragglers


def test_a_remote_worker_that_falls_silent_is_overdue_while_the_engine_waits(transport: Transport) -> None:
    cluster = Cluster(transport, number=1, shared=False)
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    assert cluster.slow.reached.wait(WAIT)
    connection = cluster.actors[0].connection
    assert not connection.overdue(0.1)
    assert cluster.collect(0.3) == ["late"]
    assert connection.overdue(0.1), "its supervisor ends it"
    cluster.close()


class Straggling(Cluster):
    """One sequence of six holds its actor up; the masks of the others take no time."""

    def __init__(self, transport: Transport, number: int = 2, shared: bool = True) -> None:
        super().__init__(transport, number, shared=shared)
        self.open(1, grammar="slow")
        self.open(2, 3, 4, 5, 6)
        assert all_ready(self.step(*((sequence, "") for sequence in range(1, 7))))
        self.lane = self.actors[self.where(1)].connection
        self.neighbours = ids(self.lane) - {1}
        assert self.neighbours

    def stick(self) -> None:
        """Ask for the slow mask, which does not come."""
        self.submit((1, "a"))
        assert self.slow.reached.wait(WAIT)
        self.dispatcher.collect(0.0, 0.0)
        time.sleep(0.05)

    def quick_masks(self, count: int) -> None:
        """Steps with the straggler alone, whose masks come at once."""
        for _ in range(count // 2):
            assert self.step((1, "a")) == ["b"]
            assert self.step((1, "ab")) == ["cd"]

    def others(self, text: str) -> list[Any]:
        """A step of the others, with a deadline that is soon over."""
        self.submit(*((sequence, text) for sequence in range(2, 7)))
        return self.collect(WAIT, 0.6)


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_sequences_behind_a_straggler_go_elsewhere(transport: Transport, shared: bool) -> None:
    cluster = Straggling(transport, shared=shared)
    cluster.stick()
    assert cluster.others("a") == ["b"] * 5
    assert ids(cluster.lane) == {1}
    cluster.open(7)
    cluster.step((7, ""))
    assert cluster.where(7) != cluster.where(1), "a slow lane takes no other sequence"
    cluster.slow.release.set()
    assert cluster.step((1, "a")) == ["b"]
    cluster.close()


def test_sequences_behind_a_mask_that_does_not_come_are_not_late(transport: Transport) -> None:
    cluster = Straggling(transport)
    cluster.submit(*((sequence, "a") for sequence in range(1, 7)))
    assert cluster.collect(WAIT, 1.0) == ["late"] + ["b"] * 5
    cluster.slow.release.set()
    cluster.close()


def test_a_known_straggler_is_not_waited_for(transport: Transport) -> None:
    cluster = Straggling(transport)
    cluster.stick()
    cluster.others("a")
    cluster.submit((1, "a"), *((sequence, "a") for sequence in range(2, 7)))
    assert cluster.collect(WAIT, 10 * WAIT) == ["late"] + ["b"] * 5, "nor is a deadline that is far away"
    cluster.close()


def test_a_sequence_that_straggles_no_more_shares_its_actor_again(transport: Transport) -> None:
    cluster = Straggling(transport)
    cluster.stick()
    cluster.others("a")
    assert cluster.others("a") == ["b"] * 5
    cluster.slow.release.set()
    cluster.quick_masks(34)
    assert not cluster.lane.stragglers
    assert cluster.others("ab") == ["cd"] * 5
    assert cluster.lane.num_open == 3
    cluster.close()


def test_a_sequence_that_straggles_again_stays_longer_on_its_lane(transport: Transport) -> None:
    cluster = Straggling(transport)
    for needed in (16, 64):
        cluster.slow.release.clear()
        cluster.slow.reached.clear()
        cluster.stick()
        cluster.others("a")
        lane = cluster.actors[cluster.where(1)].connection
        cluster.slow.release.set()
        cluster.quick_masks(needed - 4)
        assert lane.stragglers
        cluster.quick_masks(8)
        assert not lane.stragglers
        assert cluster.others("ab") == ["cd"] * 5
        assert lane.num_open > 1, "others share it"
    cluster.close()


def test_a_lane_without_its_straggler_is_an_ordinary_actor(transport: Transport) -> None:
    cluster = Straggling(transport)
    cluster.stick()
    cluster.others("a")
    cluster.dispatcher.free([1])
    cluster.open(7)
    cluster.step((7, ""))
    assert cluster.actors[cluster.where(7)].connection is not cluster.lane, "it is still held up"
    cluster.slow.release.set()
    until(lambda: cluster.lane.is_idle)
    cluster.step((7, "a"))
    cluster.open(8)
    cluster.step((8, ""))
    assert cluster.actors[cluster.where(8)].connection is cluster.lane
    cluster.close()


def test_on_the_only_actor_no_sequence_is_moved(transport: Transport) -> None:
    cluster = Straggling(transport, number=1)
    cluster.stick()
    assert cluster.step(*((sequence, "a") for sequence in range(2, 7)), timeout=0.1) == ["late"] * 5
    cluster.slow.release.set()
    assert cluster.others("a") == ["b"] * 5
    cluster.close()


# answers that are none


def test_answers_about_other_versions_or_slots_and_garbage_change_nothing(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    actor = cluster.actors[cluster.where(1)]
    assert cluster.slow.reached.wait(WAIT)
    (slot,) = actor.connection.sequences
    version = int(actor.connection.table.target[slot])
    error = to_wire(WorkerDied("no"))
    wrong = [Failed(slot, version - 1, error), Failed(99, version, error), Failed(-1, version, error), Filled()]
    columns = np.array([slot], np.int32), np.array([version]), np.zeros(1, np.float32), np.zeros(1, np.int32)
    lines = Filled(*(column.tobytes() for column in columns), b"\0" * 4)
    for message in (*map(encode, [*wrong, lines]), b"", b"\xc1garbled"):
        actor.pair.end.send(message)  # the server's thread is in a mask: the socket is free
    assert cluster.collect(0.2) == ["late"]


def test_words_without_a_place_in_a_mask_are_no_mask(transport: Transport) -> None:
    cluster = Cluster(transport, number=1, shared=False)
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    actor = cluster.actors[0]
    assert cluster.slow.reached.wait(WAIT)
    (slot,) = actor.connection.sequences
    version = actor.connection.table.target[[slot]]
    for changed, mask in (([0, 1, 2], [-1, -1]), ([WORDS], [-1])):
        columns = np.array([slot], np.int32), version, np.zeros(1, np.float32), np.int32(changed), np.int32(mask)
        actor.pair.end.send(encode(Filled(*(column.tobytes() for column in columns))))
    assert cluster.collect(0.2) == ["late"]
    cluster.close()


def test_a_sequence_that_failed_stays_failed(cluster: Cluster) -> None:
    cluster.open(1)
    for text in ("q", "a"):
        (error,) = cluster.step((1, text))
        assert isinstance(error, TokenRejected)


def test_closing_ends_everything_that_is_open(cluster: Cluster) -> None:
    cluster.open(1)
    cluster.step((1, ""))
    cluster.dispatcher.close()
    cluster.open(2)
    assert [type(row) for row in cluster.step((1, "a"), (2, ""))] == [PoolUnavailable] * 2


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_happens_a_ready_row_is_the_mask_of_its_output(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps of any rows, timeouts, rollbacks, frees, forks, actors that die, hang and join: a mask is right, or the
    row is not ready."""
    transport = Transport(str(tmp_path_factory.mktemp("s")), "127.0.0.1")
    cluster = Cluster(
        transport, slots=6, shared=data.draw(st.booleans()), max_replays=data.draw(st.sampled_from([0, 2]))
    )
    cluster.slow.release.set()
    letters = {tokens(letter)[0]: letter for letter in "abcdxyz"}
    wants = {"": "ax", "a": "b", "ab": "cd", "abc": ".", "x": "y", "xy": "z"}
    numbers: list[int] = []
    actions: list[Callable[[], None]] = []

    def opens() -> None:
        parent = data.draw(st.sampled_from([None, *numbers]))
        numbers.append(len(actions) * 1000 + len(numbers) + 1)
        text = data.draw(st.sampled_from(sorted(wants)))
        cluster.open(numbers[-1], grammar=data.draw(st.sampled_from(["fast", "slow"])), parent=parent, text=text)

    def steps() -> None:
        rows = data.draw(st.lists(st.sampled_from(numbers), max_size=8, unique=True)) if numbers else []
        texts = [data.draw(st.sampled_from(sorted(wants))) for _ in rows]
        for number, text in zip(rows, texts, strict=True):
            if (
                cluster.sequences[number].output_token_ids
                != tokens(text)[: len(cluster.sequences[number].output_token_ids)]
            ):
                cluster.dispatcher.rollback(number, 0)
        found = cluster.step(*zip(rows, texts, strict=True), timeout=data.draw(st.sampled_from([0.0, 0.001, 1.0])))
        for text, outcome in zip(texts, found, strict=True):
            assert isinstance(outcome, GuidedError) or outcome in ("late", wants[text])

    def continues() -> None:
        """Rows that go on by the token that is allowed first, given as an array."""
        rows = tuple(cluster.sequences[number] for number in numbers)
        new = None
        for _ in range(3):
            cluster.dispatcher.submit(rows, new)
            found = outcomes(cluster.dispatcher.collect(1.0), len(rows))
            wanted = [wants["".join(letters[token] for token in row.output_token_ids)] for row in rows]
            assert all(isinstance(a, GuidedError) or a in ("late", b) for a, b in zip(found, wanted, strict=True))
            if not all_ready(found) or set(found) & {"cd", "z", "."}:  # the next output may be none of `wants`
                return
            new = np.array([tokens(str(outcome))[0] for outcome in found], np.int32)
            for row, token in zip(rows, new.tolist(), strict=True):
                row.output_token_ids = [*row.output_token_ids, token]

    def settles() -> None:
        assert set(cluster.dispatcher.settled(data.draw(st.sampled_from([0.0, 0.01])))) <= set(numbers)

    def frees() -> None:
        if numbers:
            cluster.dispatcher.free([numbers.pop(data.draw(st.integers(0, len(numbers) - 1)))])

    def dies() -> None:
        cluster.end(data.draw(st.integers(0, len(cluster.actors) - 1)), hung=data.draw(st.booleans()))
        cluster.join(len(cluster.actors), slots=6)

    try:
        for _ in range(data.draw(st.integers(3, 15))):
            action = data.draw(st.sampled_from([opens, opens, steps, steps, continues, settles, frees, dies]))
            actions.append(action)
            action()
    finally:  # hypothesis gives up on some of its examples
        cluster.dispatcher.close()
        close_all()
        transport.close()


def test_the_test_vocabulary_is_that_of_the_masks() -> None:
    assert BYTES.padded_vocab_size <= WORDS * 32
    assert allowed(np.zeros(WORDS, np.int32)) == ""
