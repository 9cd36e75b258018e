"""Which sequences are lost with a worker, which are placed again, and where suspects go. No actor, no Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import pytest
from thread_actor import ConnectedPair

from actors.channel import Transport
from actors.steps.connection import SequenceState, WorkerConnection
from actors.steps.placement import Placement, Recovery, WorkerDown
from guided.errors import WorkerDied
from guided.pools.protocol import EndCause
from guided.sequence import GuidedSequence

_ids = count(1)


class Workers:
    """Workers that have the grammar `g`, with some sequences on each."""

    def __init__(self, transport: Transport, *population: int, shared: bool = True) -> None:
        self.placement = Placement()
        self.pairs = [ConnectedPair(transport, index=index, shared=shared) for index in range(len(population))]
        self.workers = [pair.connection for pair in self.pairs]
        for pair in self.pairs:
            pair.installed.add("g")
            self.placement.add(pair.connection)
        self.states: list[SequenceState] = []
        for index, number in enumerate(population):
            others = [worker for worker in self.workers if worker is not self.workers[index]]
            for other in others:
                other.retiring = True
            self.states += [self.new() for _ in range(number)]
            for state in self.states[len(self.states) - number :]:
                assert self.placement.place(state, None, 0.0)
                self.answer(state)
            for other in others:
                other.retiring = False
        self.placement.needs_rebalancing = False

    def new(self) -> SequenceState:
        return SequenceState(GuidedSequence("request", next(_ids), []), "g", None)

    def suspect(self) -> SequenceState:
        state = self.new()
        state.suspect = True
        self.placement.suspects.add(state)
        return state

    def fill(self, *states: SequenceState) -> None:
        """Have the worker be at a mask of the first of these, and owe the others."""
        for state in states:
            assert state.worker is not None
            table = state.worker.table
            table.target[state.slot] += 1
            state.worker.asked[state.slot] = table.target[state.slot]
        assert states[0].worker is not None
        states[0].worker.table.mark["busy"] = states[0].slot

    @staticmethod
    def answer(state: SequenceState) -> None:
        """Have the worker give a mask."""
        assert state.worker is not None
        table = state.worker.table
        table.ready[state.slot] = state.worker.asked[state.slot] = table.target[state.slot]

    def end(self, index: int, replays: int = 0, cause: EndCause = "died", loading: bool = False) -> Recovery:
        return Recovery(WorkerDown(self.workers[index], WorkerDied("gone"), cause, loading), replays)

    def close(self) -> None:
        for pair in self.pairs:
            pair.connection.close()
            pair.close()


@pytest.fixture
def one(transport: Transport) -> Iterator[Workers]:
    """One worker with two sequences that had a mask, and one that had none."""
    workers = Workers(transport, 2)
    workers.states.append(workers.new())
    workers.placement.place(workers.states[-1], None, 0.0)
    yield workers
    workers.close()


def test_by_default_a_death_ends_the_sequences_that_were_open_there(one: Workers) -> None:
    suspect, bystander, fresh = one.states
    one.fill(suspect, bystander)
    recovery = one.end(0)
    assert recovery.is_lost(bystander)
    assert recovery.is_lost(suspect)
    assert not recovery.is_lost(fresh), "it had no mask from there, and was not being filled"
    assert not recovery.error(suspect).retryable
    assert recovery.error(bystander).retryable


def test_a_sequence_without_a_mask_is_lost_if_it_was_being_filled(one: Workers) -> None:
    one.fill(one.states[2])
    assert one.end(0).is_lost(one.states[2])


@pytest.mark.parametrize("cause", ["hung", "memory"])
def test_a_worker_that_is_ended_for_one_mask_ends_that_sequence(one: Workers, cause: EndCause) -> None:
    suspect, bystander, _ = one.states
    assert not one.end(0, cause=cause).is_lost(suspect), "no mask was being filled"
    one.fill(suspect, bystander)
    assert one.end(0, cause=cause).is_lost(suspect)
    assert not one.end(0, cause=cause).is_lost(bystander)


@pytest.mark.parametrize("cause", ["died", "hung", "memory"])
def test_a_suspect_is_tried_max_replays_times_and_bystanders_are_replayed(one: Workers, cause: EndCause) -> None:
    suspect, bystander, _ = one.states
    one.fill(suspect, bystander)
    assert [one.end(0, 2, cause).is_lost(suspect) for _ in range(3)] == [False, False, True]
    assert suspect.suspect
    assert not one.end(0, 2, cause).is_lost(bystander)
    assert not bystander.suspect


def test_without_certainty_a_suspect_is_tried_alone_and_nothing_is_counted(one: Workers, transport: Transport) -> None:
    remote = Workers(transport, 2, shared=False)
    for workers, loading in ((one, True), (remote, False)):
        suspect, other = workers.states[:2]
        workers.fill(suspect, other)  # without shared memory it may be either
        for _ in range(5):
            assert not workers.end(0, 1, loading=loading).is_lost(suspect)
        assert suspect.suspect
        assert suspect.deaths == 0
    remote.close()


def test_a_retired_worker_was_filling_nothing(one: Workers) -> None:
    one.fill(one.states[0])
    assert not one.end(0, cause="retired").is_lost(one.states[0])
    assert not one.states[0].suspect


def test_no_sequence_is_moved_without_end(one: Workers) -> None:
    unlucky = one.states[2]
    for _ in range(50):
        one.answer(unlucky)
        assert not one.end(0, 1).is_lost(unlucky), "it has masks between"
    assert unlucky.worker is not None
    unlucky.worker.table.ready[unlucky.slot] = -1
    assert any(one.end(0, 1).is_lost(unlucky) for _ in range(50))


@pytest.mark.parametrize(("population", "where"), [((2, 0), 1), ((2, 3), 0), ((0,), 0), ((2,), None), ((0, 0, 1), 0)])
def test_a_suspect_gets_a_worker_that_is_empty_or_that_others_can_leave(
    transport: Transport, population: tuple[int, ...], where: int | None
) -> None:
    workers = Workers(transport, *population)
    placement, suspect, now = workers.placement, workers.suspect(), time.monotonic()
    assert placement.isolate(suspect, now) == (where is not None)
    if where is not None:
        worker = workers.workers[where]
        assert list(worker.sequences.values()) == [suspect]
        assert worker.reserved_for is suspect
        newcomer = workers.new()
        if placement.place(newcomer, None, now):
            assert newcomer.worker is not worker, "no other sequence is put there"
        workers.answer(suspect)
        placement.clear_suspects()
        assert worker.reserved_for is None
        assert not suspect.suspect
    workers.close()


def test_after_a_while_the_others_wait_for_the_suspect(transport: Transport) -> None:
    workers = Workers(transport, 2)
    suspect = workers.suspect()
    suspect.waiting_since = time.monotonic() - 11
    assert workers.placement.isolate(suspect, time.monotonic())
    assert list(workers.workers[0].sequences.values()) == [suspect]
    workers.close()


def test_a_worker_without_its_suspect_takes_any_sequence(transport: Transport) -> None:
    workers = Workers(transport, 0)
    suspect = workers.suspect()
    assert workers.placement.isolate(suspect, time.monotonic())
    workers.placement.withdraw(suspect)
    assert workers.workers[0].reserved_for is None
    assert workers.placement.place(workers.new(), None, 0.0)
    workers.close()


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_progress_is_measured_from_the_request_or_the_last_mark(transport: Transport, shared: bool) -> None:
    workers = Workers(transport, 1, shared=shared)
    worker: WorkerConnection = workers.workers[0]
    assert worker.is_idle
    assert worker.stuck_seconds(time.monotonic()) == 0.0
    now = time.monotonic()
    worker.begin_asking()
    workers.fill(workers.states[0])
    worker.send(b"", now)
    assert worker.stuck_seconds(now + 3.0) == pytest.approx(3.0)
    if shared:
        assert worker.overdue(0.0)
        worker.table.mark["since"] = now + 1.0
        assert worker.stuck_seconds(now + 3.0) == pytest.approx(2.0)
    workers.answer(workers.states[0])
    assert worker.stuck_seconds(now + 3.0) == 0.0
    workers.close()


def test_slow_masks_do_not_become_typical() -> None:
    placement = Placement()
    for _ in range(2000):
        placement.note_typical(1.0)
    assert placement.straggler_seconds < 0.5


def test_a_straggler_takes_the_other_sequences_of_its_request_along(transport: Transport) -> None:
    workers = Workers(transport, 3, 1)
    straggler, sibling, other, _ = workers.states
    other.sequence.request_id = "another"
    workers.fill(straggler, sibling, other)
    now = time.monotonic() + 1.0
    assert set(workers.placement.clear_stuck_workers(now)) == {other}
    assert workers.placement.stragglers >= {straggler, sibling}
    assert other not in workers.placement.stragglers
    workers.close()


def test_a_new_lane_takes_every_sequence_with_slow_masks(transport: Transport) -> None:
    workers = Workers(transport, 3, 1)
    straggler, slow, quick, elsewhere = workers.states
    for state, seconds in ((slow, 0.05), (quick, 0.001), (elsewhere, 0.05)):
        assert state.worker is not None
        state.sequence.request_id = f"of its own {state.sequence_id}"
        state.worker.table.seconds[state.slot] = seconds
    workers.fill(straggler, slow, quick)
    assert set(workers.placement.clear_stuck_workers(time.monotonic() + 1.0)) == {quick}
    assert workers.placement.stragglers == {straggler, slow, elsewhere}
    workers.close()


def test_beside_a_lane_a_sequence_with_a_slow_mask_is_a_straggler(transport: Transport) -> None:
    workers = Workers(transport, 2)
    slow, quick = workers.states
    workers.placement.note_slow(slow, 0.05)
    workers.placement.note_slow(quick, 0.005)
    assert workers.placement.stragglers == {slow}
    workers.close()


def test_a_sequence_that_moves_is_known_to_be_slow(transport: Transport) -> None:
    workers = Workers(transport, 1)
    (state,) = workers.states
    assert state.worker is not None
    state.worker.table.seconds[state.slot] = 0.5
    workers.placement.withdraw(state)
    assert state.seconds == 0.5
    workers.close()


def test_a_straggler_waits_for_a_lane_rather_than_join_the_others(transport: Transport) -> None:
    workers = Workers(transport, 1)
    straggler = workers.new()
    workers.placement.stragglers.add(straggler)
    assert not workers.placement.place(straggler, None, 100.0)
    straggler.waiting_since = 100.0
    assert not workers.placement.place(straggler, None, 105.0)
    assert workers.placement.place(straggler, None, 111.0), "but not for long"
    workers.close()


def test_a_straggler_does_not_wait_where_it_holds_up_no_other_sequence(transport: Transport) -> None:
    workers = Workers(transport, 0)
    straggler = workers.new()
    workers.placement.stragglers.add(straggler)
    assert workers.placement.place(straggler, None, 100.0)
    workers.close()
