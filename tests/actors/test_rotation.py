"""Placing, steps and leases, with actors on threads: what the engine's thread does, without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedGrammar
from slow_grammar import SlowGrammar
from thread_actor import ThreadActor, close_all

from actors.channel import Transport
from actors.link import Packed
from actors.rotation import Rotation
from actors.supervision.supervisor import WorkerDown, WorkerUp
from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, WorkerDied
from guided.messages import RowResult, RowStatus, StepAnswer, encode
from guided.pool import Fill, Grammar, Row

WAIT = 30.0


def make_slow(host: Host, sequence: int) -> None:
    placed = host.rotation._sequences[sequence]
    placed.seconds, placed.usual = 0.5, False


ABC = [tokens("abc"), tokens("abd"), tokens("xyz")]


def named(key: str) -> Grammar:
    return Grammar(key, "scripted", Constraint.json_object(), (key,))


class Host:
    """A rotation of two actors that know the grammars `fast` and `slow`."""

    def __init__(
        self, transport: Transport, number: int = 2, rows: int = 8, shared: bool = True, **limits: Any
    ) -> None:
        self.transport = transport
        self.refused: dict[str, GuidedError] = {}
        self.rotation = Rotation(rejection_of=self.refused.get, **limits)
        self.slow = SlowGrammar(ABC, slow_at=1)
        self.actors: list[ThreadActor] = []
        for index in range(number):
            self.join(index, rows, shared)
        self.bitmask = np.full((16, WORDS), 7, np.int32)

    def join(self, index: int, rows: int = 8, shared: bool = True) -> ThreadActor:
        grammars = {"fast": ScriptedGrammar(ABC), "slow": self.slow}
        actor = ThreadActor(self.transport, grammars, rows=rows, shared=shared, index=index)
        self.actors.append(actor)
        self.rotation.announce(WorkerUp(actor.link))
        return actor

    def open(self, *sequences: int, grammar: str = "fast", parent: int | None = None) -> None:
        for sequence in sequences:
            self.rotation.open(sequence, named(grammar), parent)

    def submit(self, *fills: tuple[int, str]) -> None:
        self.rotation.submit([Fill(sequence, 0, tokens(text)) for sequence, text in fills])

    def collect(self, timeout: float = WAIT) -> list[Row]:
        return list(self.rotation.collect(self.bitmask, timeout))

    def step(self, *fills: tuple[int, str], timeout: float = WAIT) -> list[str]:
        self.submit(*fills)
        return [row.state for row in self.collect(timeout)]

    def where(self, sequence: int) -> int:
        (index,) = [index for index, actor in enumerate(self.actors) if sequence in actor.link.sequences]
        return index

    def end(self, index: int, hung: bool = False) -> None:
        error = MaskTimeout(f"worker {index} hung") if hung else WorkerDied(f"worker {index} died")
        self.rotation.announce(WorkerDown(self.actors[index].link, error, "hung" if hung else "died"))


@pytest.fixture
def host(transport: Transport) -> Iterator[Host]:
    host = Host(transport)
    yield host
    host.slow.release.set()
    host.rotation.close()


def test_new_sequences_go_where_the_fewest_are_and_stay_there(host: Host) -> None:
    host.open(1, 2, 3, 4)
    assert [host.where(sequence) for sequence in (1, 2, 3, 4)] == [0, 1, 0, 1]
    host.rotation.free([2, 4])
    host.open(5, 6)
    assert [host.where(sequence) for sequence in (1, 3, 5, 6)] == [0, 0, 1, 1]
    for text in ("", "a", "ab"):
        assert host.step((1, text), (5, text)) == ["ready", "ready"]
    assert [host.where(sequence) for sequence in (1, 5)] == [0, 1]


def test_a_mask_that_is_read_in_place_is_lent_to_nobody_before_the_next_step(host: Host) -> None:
    host.open(1, 2)
    host.submit((1, "a"), (2, "x"))
    rows = host.rotation.collect(None, WAIT)
    masks = [row.mask for row in rows if row.mask is not None]
    assert [allowed(mask) for mask in masks] == ["b", "y"]
    host.rotation.free([1])
    assert [len(actor.link.leases._free) for actor in host.actors] == [7, 7]
    host.end(1)
    host.rotation.failures()
    assert [allowed(mask) for mask in masks] == ["b", "y"], "also of an actor that is gone"
    host.submit()
    assert len(host.actors[0].link.leases._free) == 8


def test_a_fork_goes_to_its_parent_however_busy_that_is(host: Host) -> None:
    host.open(1, 2)
    for fork in (3, 4, 5):
        host.open(fork, parent=1)
    assert {host.where(sequence) for sequence in (1, 3, 4, 5)} == {0}


def test_an_actor_that_lacks_the_grammar_gets_no_sequence_of_it(host: Host) -> None:
    host.actors[0].wire.installed.discard("fast")
    host.open(1, 2)
    assert {host.where(1), host.where(2)} == {1}


def test_where_no_actor_has_the_grammar_yet_a_sequence_waits_for_one_that_does(host: Host) -> None:
    for actor in host.actors:
        actor.wire.installed.discard("fast")
        actor.worker.uninstall("fast")
    host.open(1)
    assert host.step((1, ""), timeout=0.05) == ["unplaced"]
    assert host.rotation.settled([1], 0.05) == []

    def load() -> None:
        host.actors[1].worker.install("fast", ScriptedGrammar(ABC))
        host.actors[1].wire.installed.add("fast")

    host.submit((1, ""))
    threading.Timer(0.1, load).start()
    assert [row.state for row in host.collect()] == ["ready"]
    assert host.where(1) == 1


def test_without_an_actor_rows_wait_for_one_and_then_fail(transport: Transport) -> None:
    host = Host(transport, number=0, pool_wait=0.3)
    host.open(1)
    started = time.monotonic()
    assert host.step((1, "")) == ["unplaced"], "nobody blocks the step"
    assert host.rotation.settled([1], 0.01) == []
    assert host.rotation.settled([1], WAIT) == [1]
    assert time.monotonic() - started >= 0.3
    host.submit((1, ""))
    (row,) = host.collect()
    assert row.state == "failed"
    assert isinstance(row.error, PoolUnavailable)
    host.rotation.close()


def test_who_waits_for_a_grammar_that_is_refused_fails_with_the_reason(transport: Transport) -> None:
    host = Host(transport)
    host.end(0)
    host.end(1)
    host.open(1)
    assert host.step((1, "")) == ["unplaced"]
    assert host.rotation.settled([1], 0.0) == []
    host.refused["fast"] = WorkerDied("loading it ended its worker")
    assert host.rotation.settled([1], WAIT) == [1]
    host.submit((1, ""))
    (row,) = host.collect()
    assert row.error is host.refused["fast"]
    host.rotation.close()


def test_a_late_row_is_kept_and_its_neighbours_go_on(host: Host) -> None:
    host.open(1, grammar="slow")
    host.open(2)
    assert host.step((1, ""), (2, "")) == ["ready", "ready"]
    assert host.step((1, "a"), (2, "a"), timeout=0.1) == ["late", "ready"]
    leases = host.actors[host.where(1)].link.leases
    assert [leases.owners[row] for row in leases.outstanding()] == [1]
    assert host.step((2, "ab")) == ["ready"]
    host.slow.release.set()
    host.submit((1, "a"))
    assert len(leases.outstanding()) == 1, "what is under way is not asked for again"
    (row,) = host.collect()
    assert row.state == "ready"
    assert allowed(host.bitmask[0]) == "b"
    assert leases.outstanding() == []


def test_a_late_answer_that_came_between_two_steps_is_there_at_once(host: Host) -> None:
    host.open(1, grammar="slow")
    assert host.step((1, "a"), timeout=0.05) == ["late"]
    host.slow.release.set()
    link = host.actors[host.where(1)].link
    deadline = time.monotonic() + WAIT
    while link.leases.outstanding():
        assert time.monotonic() < deadline
        assert host.step() == []
    assert link.leases.num_free == 7
    assert host.step((1, "a"), timeout=0.0) == ["ready"]
    assert allowed(host.bitmask[0]) == "b"


def test_patience_starts_to_count_with_the_first_mask(host: Host) -> None:
    host.open(1, grammar="slow")
    host.open(2)
    host.submit((1, "a"), (2, "a"))
    rows = host.rotation.collect(host.bitmask, WAIT, 0.0)
    assert [row.state for row in rows] == ["late", "ready"]
    host.submit((1, "a"))
    threading.Timer(0.2, host.slow.release.set).start()
    (row,) = host.rotation.collect(host.bitmask, WAIT, 0.0)  # nobody could go on without it
    assert row.state == "ready"


def test_a_late_row_is_settled_once_its_answer_is_there(host: Host) -> None:
    host.open(1, grammar="slow")
    assert host.step((1, "a"), timeout=0.05) == ["late"]
    assert host.rotation.settled([1], 0.05) == []
    threading.Timer(0.1, host.slow.release.set).start()
    assert host.rotation.settled([1], WAIT) == [1]
    assert host.step((1, "a"), timeout=0.0) == ["ready"]
    assert allowed(host.bitmask[0]) == "b"


@pytest.mark.parametrize("hung", [False, True])
def test_a_late_row_is_settled_where_its_actor_is_gone(host: Host, hung: bool) -> None:
    host.open(1, grammar="slow")
    host.open(2)
    host.open(3, parent=1)
    assert host.step((1, "a"), (3, "a"), timeout=0.05) == ["late", "late"]
    threading.Timer(0.1, host.end, [host.where(1), hung]).start()
    assert host.rotation.settled([1], WAIT) == [1]
    assert host.step((1, "a"), timeout=0.0) == ["failed"]
    assert set(host.rotation.failures()) == {1}, "the other was moved away before"
    assert host.step((3, "a")) == ["ready"]


class Straggling:
    """One sequence of many holds its actor up, three times; the others' masks take no time."""

    def __init__(self, transport: Transport, number: int = 2, shared: bool = True) -> None:
        self.host = host = Host(transport, number, shared=shared)
        host.open(1, grammar="slow")
        host.open(2, 3, 4, 5, 6)
        assert host.step(*((sequence, "") for sequence in range(1, 7))) == ["ready"] * 6
        self.lane = host.actors[host.where(1)].link
        self.neighbours = set(self.lane.sequences) - {1}
        assert self.neighbours

    def stick(self) -> None:
        """The slow mask is asked for, after its neighbours', and doesn't come."""
        self.host.submit((1, "a"))
        assert self.host.slow.reached.wait(WAIT)
        self.host.rotation.collect(self.host.bitmask, 0.0, 0.0)
        time.sleep(0.05)

    def step(self, text: str) -> list[str]:
        """The others' step, with a deadline that is past."""
        self.host.submit(*((sequence, text) for sequence in range(2, 7)))
        return [row.state for row in self.host.rotation.collect(self.host.bitmask, WAIT, 0.2)]


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_who_waits_behind_a_straggler_goes_elsewhere(transport: Transport, shared: bool) -> None:
    case = Straggling(transport, shared=shared)
    host = case.host
    case.stick()
    first = case.step("a")
    assert sorted(first) == ["ready"] * (5 - len(case.neighbours)) + ["unplaced"] * len(case.neighbours)
    assert case.step("a") == ["ready"] * 5
    assert case.lane.sequences == {1}
    assert [allowed(row) for row in host.bitmask[:5]] == ["b"] * 5
    host.open(7)
    assert host.where(7) != host.where(1), "a slow lane takes nobody else"
    host.slow.release.set()
    assert host.step((1, "a")) == ["ready"]
    assert allowed(host.bitmask[0]) == "b"
    host.rotation.close()


def test_nobody_waits_for_a_known_straggler(transport: Transport) -> None:
    case = Straggling(transport)
    host = case.host
    case.stick()
    case.step("a")
    host.submit((1, "a"), *((sequence, "a") for sequence in range(2, 7)))
    states = [row.state for row in host.rotation.collect(host.bitmask, WAIT, 10 * WAIT)]
    assert states == ["late"] + ["ready"] * 5, "a deadline that is far away is not waited for"
    host.slow.release.set()
    host.rotation.close()


def test_one_who_straggles_no_more_shares_its_actor_again(transport: Transport) -> None:
    case = Straggling(transport)
    host = case.host
    case.stick()
    case.step("a")
    assert case.step("a") == ["ready"] * 5
    host.slow.release.set()
    for _ in range(17):
        assert host.step((1, "a")) == ["ready"]
    assert not case.lane.stragglers
    assert set(case.step("a")) <= {"ready", "unplaced"}
    assert case.step("a") == ["ready"] * 5
    assert len(case.lane.sequences) == 3
    host.rotation.close()


def test_a_lane_whose_straggler_is_freed_is_an_actor_like_the_others(transport: Transport) -> None:
    case = Straggling(transport)
    case.stick()
    case.step("a")
    case.host.rotation.free([1])
    case.host.open(7)
    assert case.host.actors[case.host.where(7)].link is not case.lane, "it is still held up"
    case.host.slow.release.set()
    deadline = time.monotonic() + WAIT
    while case.lane.leases.num_free < 8:
        assert time.monotonic() < deadline
        case.host.step()
    case.host.open(8)
    assert case.host.actors[case.host.where(8)].link is case.lane
    case.host.rotation.close()


def test_a_second_straggler_joins_the_first_on_its_lane(transport: Transport) -> None:
    case = Straggling(transport)
    host = case.host
    case.stick()
    case.step("a")
    host.slow.release.set()
    assert host.step((1, "a")) == ["ready"]
    other = host.rotation._sequences[2]
    assert other.link is not case.lane
    other.prompt_rows, other.usual = 0, False
    assert host.step((2, "a")) == ["ready"]
    assert case.lane.sequences == {1, 2} == case.lane.stragglers
    host.rotation.close()


def test_on_the_only_actor_nobody_is_moved(transport: Transport) -> None:
    case = Straggling(transport, number=1)
    case.stick()
    assert case.host.step(*((sequence, "a") for sequence in range(2, 7)), timeout=0.1) == ["late"] * 5
    case.host.slow.release.set()
    assert case.step("a") == ["ready"] * 5
    case.host.rotation.close()


def test_slow_rows_travel_after_the_others_in_a_message_of_their_own(host: Host) -> None:
    host.open(1, 2, 3, 4)
    host.slow.release.set()
    host.step((1, ""), (3, ""))
    make_slow(host, 1)
    link = host.actors[host.where(1)].link
    sent: list[list[int]] = []
    pack = link.pack

    def recorded(number: int) -> Packed:
        sent.append([sequence for sequence, *_ in link.outbox.fills])
        return pack(number)

    link.pack = recorded  # type: ignore[method-assign]
    assert host.step((1, "a"), (3, "a")) == ["ready", "ready"]
    assert sent == [[3], [1]]


def test_a_late_mask_is_no_answer_to_a_later_question(host: Host) -> None:
    host.open(1, grammar="slow")
    assert host.step((1, "a"), timeout=0.05) == ["late"]
    host.slow.release.set()
    assert host.step((1, "x")) == ["ready"]
    assert allowed(host.bitmask[0]) == "y"
    assert host.step((1, "ab")) == ["ready"]
    assert allowed(host.bitmask[0]) == "cd"
    assert host.actors[0].link.leases.num_free == 7


def test_a_freed_sequences_row_is_not_lent_until_the_worker_is_done_with_it(host: Host) -> None:
    host.open(1, grammar="slow")
    assert host.step((1, "a"), timeout=0.05) == ["late"]
    link = host.actors[host.where(1)].link
    host.rotation.free([1])
    assert link.leases.num_free == 7
    host.slow.release.set()
    deadline = time.monotonic() + WAIT
    while link.leases.num_free < 8:
        assert time.monotonic() < deadline
        host.step()


def test_more_rows_than_a_worker_has_wait_for_a_later_step(transport: Transport) -> None:
    host = Host(transport, number=1, rows=3)
    host.open(1, 2, 3, 4, 5)
    fills = [(sequence, "") for sequence in (1, 2, 3, 4, 5)]
    assert host.step(*fills) == ["ready"] * 3 + ["late"] * 2
    assert host.step(*fills[3:]) == ["ready"] * 2
    host.rotation.close()


def test_known_slow_rows_are_filled_last(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.rotation.open(1, named("slow"), None)
    host.open(2)
    host.open(3, parent=1)
    host.slow.release.set()
    assert host.step((1, ""), (3, "")) == ["ready", "ready"]
    make_slow(host, 1)
    host.submit((1, "a"), (2, "a"), (3, "a"))
    assert [part.fill(0).sequence_id for part in host.rotation._step.parts] == [3, 2, 1]
    assert [row.state for row in host.collect()] == ["ready"] * 3


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_a_dead_actors_sequences_are_lost_once_and_the_others_go_on(transport: Transport, shared: bool) -> None:
    host = Host(transport, shared=shared)
    host.open(1, 2, 3, 4)
    assert host.step((1, ""), (2, ""), (3, ""), (4, "")) == ["ready"] * 4
    host.end(0)
    assert set(host.rotation.failures()) == {1, 3}
    assert host.rotation.failures() == {}
    host.submit((1, "a"), (2, "a"), (3, "a"), (4, "a"))
    rows = host.collect()
    assert [row.state for row in rows] == ["failed", "ready", "failed", "ready"]
    assert isinstance(rows[0].error, WorkerDied)
    host.open(5)
    assert host.where(5) == 1
    host.rotation.close()


def test_a_death_ends_the_wait_for_its_rows(host: Host) -> None:
    host.open(1, grammar="slow")
    host.submit((1, "a"))
    assert host.slow.reached.wait(WAIT)
    host.end(host.where(1))
    (row,) = host.collect()
    assert row.state == "failed"
    assert isinstance(row.error, WorkerDied)


def test_who_was_not_yet_sent_to_a_dead_actor_is_placed_again(host: Host) -> None:
    host.open(1, 2)
    host.end(0)
    assert host.step((1, ""), (2, "")) == ["ready", "ready"]
    assert host.where(1) == host.where(2) == 1
    assert host.rotation.failures() == {}


def test_a_hang_loses_the_sequence_it_hangs_in_and_moves_the_others(host: Host) -> None:
    host.open(1, grammar="slow")
    host.open(2)
    host.open(3, 4, parent=1)
    assert host.step((1, ""), (2, ""), (3, ""), (4, "")) == ["ready"] * 4
    host.submit((3, "a"), (1, "a"), (4, "a"), (2, "a"))  # 3 is answered, 1 hangs, 4 waits behind it
    assert host.slow.reached.wait(WAIT)
    host.end(host.where(1), hung=True)
    rows = host.collect()
    assert [row.state for row in rows][1:] == ["failed", "unplaced", "ready"]
    assert rows[0].state in ("ready", "unplaced")
    assert isinstance(rows[1].error, MaskTimeout)
    assert set(host.rotation.failures()) == {1}
    assert host.step((3, "a"), (4, "a")) == ["ready", "ready"]
    assert host.where(3) == host.where(4) == 1


def test_rows_wait_for_an_actor_where_none_is_up(host: Host) -> None:
    host.open(1, 2)
    host.end(0)
    host.end(1)
    assert host.step((1, ""), (2, "")) == ["unplaced", "unplaced"]
    host.submit((1, ""), (2, ""))
    host.join(2)
    assert [row.state for row in host.collect()] == ["ready", "ready"]


def test_answers_that_nobody_asked_for_change_nothing(host: Host) -> None:
    host.open(1, grammar="slow")
    host.submit((1, "a"))
    actor = host.actors[host.where(1)]
    assert host.slow.reached.wait(WAIT)
    (row,) = actor.link.leases.outstanding()
    number = actor.link.leases.asked(row)
    actor.rows.masks[:] = -1
    right = RowResult(1, 1, row, RowStatus.FAILED)
    wrong = [
        StepAnswer(actor.wire.incarnation + 1, number, [right]),
        StepAnswer(actor.wire.incarnation, number - 1, [right]),
        StepAnswer(actor.wire.incarnation, number + 1, [right]),
        StepAnswer(actor.wire.incarnation, number, [RowResult(2, 1, row, RowStatus.FAILED)]),
        StepAnswer(actor.wire.incarnation, number, [RowResult(1, 1, 99, RowStatus.FAILED)]),
        StepAnswer(actor.wire.incarnation, number, [RowResult(1, 1, -1, RowStatus.FAILED)]),
        StepAnswer(actor.wire.incarnation, number, [RowResult(1, 1, row, RowStatus.READY)]),  # masks aren't told here
    ]
    for message in (*map(encode, wrong), b"", b"\xc1garbled"):
        actor.wire.socket.send(message)  # the step thread is in a mask: the socket is free
    assert [row.state for row in host.collect(0.2)] == ["late"]
    assert (host.bitmask == 7).all()


def test_a_mask_of_another_size_is_no_mask(transport: Transport) -> None:
    host = Host(transport, number=1, shared=False)
    host.open(1, grammar="slow")
    host.submit((1, "a"))
    actor = host.actors[0]
    assert host.slow.reached.wait(WAIT)
    (place,) = actor.link.leases.outstanding()
    short = RowResult(1, 1, place, RowStatus.READY, mask=b"\xff" * 4)
    number = actor.link.leases.asked(place)
    actor.wire.socket.send(encode(StepAnswer(actor.wire.incarnation, number, [short])))
    (row,) = host.collect()
    assert row.state == "failed"
    assert isinstance(row.error, BackendError)
    assert (host.bitmask == 7).all()
    host.slow.release.set()
    host.rotation.close()


def test_a_sequence_that_failed_stays_failed(host: Host) -> None:
    host.open(1)
    assert host.step((1, "q")) == ["failed"]
    assert host.step((1, "a")) == ["failed"]


def test_frees_reach_the_worker_with_the_next_step_or_at_once(host: Host) -> None:
    host.open(1, 2, 3)
    host.step((1, ""), (2, ""), (3, ""))
    worker, other = host.actors[0].worker, host.actors[1].worker
    assert (worker.num_open, other.num_open) == (2, 1)
    host.rotation.free([1])
    host.step((3, "a"))
    assert worker.num_open == 1
    host.rotation.free([2, 3])
    deadline = time.monotonic() + WAIT
    while worker.num_open or other.num_open:
        assert time.monotonic() < deadline


def test_closing_ends_everything_that_is_open(host: Host) -> None:
    host.open(1)
    host.step((1, ""))
    host.rotation.close()
    assert host.step((1, "a")) == ["failed"]
    with pytest.raises(PoolUnavailable):
        host.open(2)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_a_ready_row_is_the_mask_of_its_text(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps of any rows, timeouts, frees, forks, actors that die, hang and join: a mask is right, or isn't `ready`."""
    transport = Transport(str(tmp_path_factory.mktemp("s")), "127.0.0.1")
    host = Host(transport, rows=4)
    host.slow.release.set()
    wants: dict[str, str] = {"": "ax", "a": "b", "ab": "cd", "abc": ".", "x": "y", "xy": "z"}
    sequences: list[int] = []
    actions: list[Callable[[], None]] = []

    def opens() -> None:
        parent = data.draw(st.sampled_from([None, *sequences]))
        sequences.append(len(actions) * 1000 + len(sequences) + 1)
        host.open(sequences[-1], grammar=data.draw(st.sampled_from(["fast", "slow"])), parent=parent)

    def steps() -> None:
        rows = data.draw(st.lists(st.sampled_from(sequences), max_size=12)) if sequences else []
        fills = [(sequence, data.draw(st.sampled_from(sorted(wants)))) for sequence in rows]
        host.bitmask[:] = 7
        host.submit(*fills)
        timeout = data.draw(st.sampled_from([0.0, 0.001, 1.0]))
        in_place = data.draw(st.booleans())
        for index, row in enumerate(host.rotation.collect(None if in_place else host.bitmask, timeout)):
            if in_place:
                assert row.mask is None or allowed(row.mask) == wants[fills[index][1]]
                assert (row.mask is not None) == (row.state == "ready")
            elif row.state == "ready":
                assert allowed(host.bitmask[index]) == wants[fills[index][1]]
            else:
                assert (host.bitmask[index] == 7).all()

    def frees() -> None:
        if sequences:
            host.rotation.free([sequences.pop(data.draw(st.integers(0, len(sequences) - 1)))])

    def dies() -> None:
        host.end(data.draw(st.integers(0, len(host.actors) - 1)), hung=data.draw(st.booleans()))
        host.join(len(host.actors), rows=4)

    try:
        for _ in range(data.draw(st.integers(3, 15))):
            action = data.draw(st.sampled_from([opens, opens, steps, steps, steps, frees, dies]))
            actions.append(action)
            action()
    finally:  # hypothesis gives up on some of its examples
        host.rotation.close()
        close_all()
        transport.close()


def test_the_test_vocabulary_is_what_the_masks_are_over() -> None:
    assert BYTES.padded_vocab_size <= WORDS * 32
