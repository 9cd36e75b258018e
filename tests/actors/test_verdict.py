"""Who is lost with an actor, who is placed again, and where suspects go. No actor, no Ray."""

from __future__ import annotations

import time
from typing import cast

import pytest
from thread_actor import Wire

from actors.channel import Transport
from actors.link import Link
from actors.placed import Placed
from actors.placement import Placement
from actors.supervision.supervisor import Cause, WorkerDown
from actors.verdict import Verdict
from guided.errors import WorkerDied
from guided.messages import OpenSequence

SUSPECT, BYSTANDER = 1, 2


def placed(sequence: int, *, confirmed: bool = True, sent: bool = True) -> Placed:
    return Placed(OpenSequence(sequence, "g"), None, sent=sent, confirmed=confirmed)


class Dead:
    """What is left of a link."""

    def __init__(self, *in_its_hands: int) -> None:
        self._sequences = set(in_its_hands)

    def in_its_hands(self) -> set[int]:
        return self._sequences


def verdict(*in_its_hands: int, replays: int = 0, cause: Cause = "died", loading: bool = False) -> Verdict:
    news = WorkerDown(cast(Link, Dead(*in_its_hands)), WorkerDied("gone"), cause, loading)
    return Verdict.on(news, replays)


def test_by_default_a_death_ends_who_was_open_there() -> None:
    news = verdict(SUSPECT)
    assert news.is_lost(placed(BYSTANDER))
    assert news.is_lost(placed(SUSPECT, confirmed=False))
    assert not news.is_lost(placed(BYSTANDER, confirmed=False)), "never answered from there, and not in its hands"
    assert not news.is_lost(placed(SUSPECT, sent=False))


@pytest.mark.parametrize("cause", ["hung", "memory"])
def test_what_is_ended_because_of_one_mask_ends_that_one(cause: Cause) -> None:
    news = verdict(SUSPECT, cause=cause)
    assert news.is_lost(placed(SUSPECT))
    assert not news.is_lost(placed(BYSTANDER))
    assert not verdict(cause=cause).is_lost(placed(SUSPECT)), "it was in no mask"


@pytest.mark.parametrize("cause", ["died", "hung", "memory"])
def test_a_suspect_is_tried_so_often_and_bystanders_are_replayed(cause: Cause) -> None:
    suspect, bystander = placed(SUSPECT), placed(BYSTANDER)
    ends = [verdict(SUSPECT, replays=2, cause=cause).is_lost(suspect) for _ in range(3)]
    assert ends == [False, False, True]
    assert suspect.suspect
    assert not verdict(SUSPECT, replays=2, cause=cause).is_lost(bystander)
    assert not bystander.suspect


@pytest.mark.parametrize("unsure", [verdict(SUSPECT, 3, replays=1), verdict(SUSPECT, replays=1, loading=True)])
def test_where_it_may_have_been_another_it_is_tried_alone_and_nothing_is_counted(unsure: Verdict) -> None:
    suspect = placed(SUSPECT)
    for _ in range(5):
        assert not unsure.is_lost(suspect)
        suspect.confirmed = True
    assert suspect.suspect
    assert suspect.deaths == 0


def test_a_retired_actor_had_nothing_in_its_hands() -> None:
    suspect = placed(SUSPECT)
    assert not verdict(SUSPECT, cause="retired").is_lost(suspect)
    assert not suspect.suspect


def test_nobody_is_moved_for_ever() -> None:
    unlucky = placed(BYSTANDER)
    for _ in range(50):
        assert not verdict(replays=1).is_lost(unlucky), "it has masks between"
        unlucky.displace()
        unlucky.sent = unlucky.confirmed = True
    ends: list[bool] = []
    while len(ends) < 50 and not any(ends):
        unlucky.confirmed = False
        ends.append(verdict(replays=1).is_lost(unlucky))
    assert any(ends)


class Rooms:
    """Actors that know the grammar, and who is on them."""

    def __init__(self, transport: Transport, *population: int) -> None:
        self.placement = Placement()
        self.wires = [Wire(transport, index=index) for index in range(len(population))]
        self.links = [wire.link for wire in self.wires]
        self.placement.links.extend(self.links)
        ids = iter(range(100, 200))
        for link, count in zip(self.links, population, strict=True):
            link.installed.add("g")
            for _ in range(count):
                sequence = placed(next(ids))
                self.placement.sequences[sequence.opening.sequence] = sequence
                self.placement._put(sequence, link)
        self.suspect = placed(SUSPECT, sent=False)
        self.suspect.suspect = True
        self.placement.sequences[SUSPECT] = self.suspect
        self.placement.suspects.add(SUSPECT)

    def close(self) -> None:
        for wire in self.wires:
            wire.link.close()
            wire.close()


@pytest.mark.parametrize(
    ("population", "where"),
    [((2, 0), 1), ((2, 3), 0), ((0,), 0), ((2,), None), ((0, 0, 1), 0)],
)
def test_a_suspect_gets_an_actor_that_is_empty_or_that_others_can_leave(
    transport: Transport, population: tuple[int, ...], where: int | None
) -> None:
    rooms = Rooms(transport, *population)
    now = time.monotonic()
    assert rooms.placement.can_place(rooms.suspect, now) == (where is not None)
    assert rooms.placement.isolate(rooms.suspect, now) == (where is not None)
    if where is not None:
        link = rooms.links[where]
        assert link.sequences == {SUSPECT}
        assert link.reserved_for == SUSPECT
        newcomer = placed(300, sent=False)
        rooms.placement.sequences[300] = newcomer
        if rooms.placement.place(newcomer, 1.0, now):
            assert newcomer.link is not link, "nobody else is put there"
        rooms.suspect.confirmed = True  # it had its mask
        rooms.placement.clear_suspects()
        assert link.reserved_for is None
        assert not rooms.suspect.suspect
    rooms.close()


def test_after_a_while_others_wait_for_the_suspect_rather_than_it_for_ever(transport: Transport) -> None:
    rooms = Rooms(transport, 2)
    rooms.suspect.waiting_since = time.monotonic() - 11
    assert rooms.placement.isolate(rooms.suspect, time.monotonic())
    assert rooms.links[0].sequences == {SUSPECT}
    rooms.close()


def test_an_actor_whose_suspect_is_gone_is_anybodys(transport: Transport) -> None:
    rooms = Rooms(transport, 0)
    assert rooms.placement.isolate(rooms.suspect, time.monotonic())
    rooms.placement.withdraw(rooms.placement.sequences.pop(SUSPECT))
    assert rooms.links[0].reserved_for is None
    rooms.placement.clear_suspects()
    assert not rooms.placement.suspects
    rooms.close()
