"""The loop inside an actor: what it takes, what it drops, when it answers."""

from __future__ import annotations

import time

import pytest
import zmq
from actors.segment import IDLE
from byte_vocabulary import allowed, tokens
from scripted_grammar import ScriptedGrammar
from slow_grammar import SlowGrammar
from thread_actor import ThreadActor

from actors.channel import Transport
from guided.messages import FillRow, OpenSequence, RowStatus, StepAnswer, StepRequest, decoder, encode

FAST = ScriptedGrammar([tokens("ab"), tokens("ac")])


def ask(actor: ThreadActor, *fills: FillRow, grammar: str = "g", step: int = 1, incarnation: int | None = None) -> None:
    opens = [OpenSequence(fill.sequence, grammar) for fill in fills]
    number = actor.wire.incarnation if incarnation is None else incarnation
    assert actor.wire.channel.send(encode(StepRequest(number, step, list(fills), opens)))


def answer(actor: ThreadActor, seconds: float = 10.0) -> StepAnswer | None:
    poller = zmq.Poller()
    poller.register(actor.wire.channel.socket, zmq.POLLIN)
    if not poller.poll(int(seconds * 1000)):
        return None
    message = actor.wire.channel.receive()
    assert message is not None
    found: StepAnswer = decoder(StepAnswer).decode(message)
    return found


def wait_done(actor: ThreadActor, row: int, step: int) -> None:
    deadline = time.monotonic() + 10
    while actor.wire.segment.rows.done[row] != step:
        assert time.monotonic() < deadline


def test_a_row_that_is_ready_is_written_into_the_segment_and_marked_there(transport: Transport) -> None:
    actor = ThreadActor(transport, {"g": FAST})
    memory = actor.wire.segment.rows
    actor.link.want()
    ask(actor, FillRow(1, 3, 0, []), FillRow(2, 0, 0, tokens("a")), step=5)
    got = answer(actor)
    assert got is not None, "somebody waits: it is said that all is done"
    assert (got.incarnation, got.step, got.results) == (actor.wire.incarnation, 5, [])
    assert memory.done.tolist() == [5, 0, 0, 5, 0, 0, 0, 0]
    assert allowed(memory.masks[3]) == "a"
    assert allowed(memory.masks[0]) == "bc"
    assert memory.seconds[3] > 0
    assert memory.mark["busy"][0] == IDLE
    ask(actor, FillRow(1, 3, 0, []), step=6)
    wait_done(actor, 3, 6)
    assert answer(actor, 0.05) is None, "nobody waits: nobody is woken"
    actor.link.close()


def test_a_row_that_failed_is_told(transport: Transport) -> None:
    actor = ThreadActor(transport, {"g": FAST})
    ask(actor, FillRow(1, 3, 0, tokens("x")), step=5)
    got = answer(actor)
    assert got is not None
    assert [(row.sequence, row.row, row.position, row.status) for row in got.results] == [(1, 3, 1, RowStatus.FAILED)]
    assert actor.wire.segment.rows.done[3] != 5
    actor.link.close()


def test_without_shared_memory_the_row_is_in_the_answer(transport: Transport) -> None:
    actor = ThreadActor(transport, {"g": FAST}, shared=False)
    ask(actor, FillRow(1, 3, 0, []), FillRow(2, 4, 0, tokens("x")))
    got = answer(actor)
    assert got is not None
    assert got.results[0].mask == actor.rows.masks[3].tobytes()
    assert got.results[1].status is RowStatus.FAILED
    assert got.results[1].mask == b""
    assert not actor.wire.segment.rows.masks.any()
    actor.link.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"hello", encode([1, 2]), encode(["a", 1, [], [], []])])
def test_a_garbled_message_is_dropped_and_the_next_one_served(transport: Transport, garbage: bytes) -> None:
    actor = ThreadActor(transport, {"g": FAST})
    assert actor.wire.channel.send(garbage)
    ask(actor, FillRow(1, 0, 0, []))
    wait_done(actor, 0, 1)
    actor.link.close()


def test_a_request_that_comes_again_or_late_is_dropped(transport: Transport) -> None:
    actor = ThreadActor(transport, {"g": FAST})
    ask(actor, FillRow(1, 0, 0, []), step=7)
    wait_done(actor, 0, 7)
    for step in (7, 6):
        ask(actor, FillRow(2, 0, 0, tokens("a")), step=step)  # by now the row may be somebody else's
    ask(actor, FillRow(1, 1, 0, []), step=8)
    wait_done(actor, 1, 8)
    assert actor.wire.segment.rows.done[0] == 7
    assert actor.worker.num_open == 1
    actor.link.close()


def test_another_incarnations_request_is_ignored(transport: Transport) -> None:
    actor = ThreadActor(transport, {"g": FAST})
    ask(actor, FillRow(1, 0, 0, []), incarnation=actor.wire.incarnation + 1)
    assert answer(actor, 0.1) is None
    assert actor.worker.num_open == 0
    actor.link.close()


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_rows_that_are_ready_dont_wait_for_a_slow_one(transport: Transport, shared: bool) -> None:
    slow = SlowGrammar([tokens("abc")], slow_at=0)
    actor = ThreadActor(transport, {"g": FAST, "slow": slow}, shared=shared)
    opens = [OpenSequence(1, "g"), OpenSequence(2, "slow"), OpenSequence(3, "g")]
    fills = [FillRow(1, 0, 0, []), FillRow(2, 1, 0, []), FillRow(3, 2, 0, [])]
    actor.wire.channel.send(encode(StepRequest(actor.wire.incarnation, 1, fills, opens)))
    assert slow.reached.wait(10)
    if shared:
        assert actor.rows.done.tolist()[:3] == [1, 0, 0]
        assert actor.rows.mark["busy"][0] == 1, "whose fault the waiting is"
        assert actor.rows.mark["since"][0] > 0
    else:
        first = answer(actor)
        assert first is not None
        assert [row.sequence for row in first.results] == [1]
    slow.release.set()
    if shared:
        wait_done(actor, 2, 1)
        assert actor.rows.done.tolist()[:3] == [1, 1, 1]
    else:
        rest: list[int] = []
        while len(rest) < 2:
            got = answer(actor)
            assert got is not None
            rest.extend(row.sequence for row in got.results)
        assert rest == [2, 3]
    actor.link.close()
