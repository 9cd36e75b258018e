"""The step server inside an actor: what it accepts, what it drops, when it answers."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from byte_vocabulary import WORDS, allowed, tokens
from msgspec.msgpack import Decoder, encode
from scripted_grammar import ScriptedGrammar
from slow_grammar import SlowGrammar
from thread_actor import ThreadActor

from actors.channel import Transport, WorkerEnd
from actors.steps.protocol import (
    EDIT,
    FAILED,
    FREE,
    IDLE,
    OK,
    Answer,
    Edit,
    Failed,
    Fill,
    Filled,
    Free,
    Open,
    Request,
    freed,
)
from guided.errors import BackendError, TokenRejected, from_wire

FAST = ScriptedGrammar([tokens("ab"), tokens("ac"), tokens("xyz")])


class _Frames:
    """Counts frames, so that a server that looks for one waits until what was sent has arrived.

    Over TCP a frame arrives some time after `send` returns.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def received_by(self, end: WorkerEnd) -> WorkerEnd:
        self._end = end
        return self

    def receive(self, *, wait: bool = True) -> bytes | None:
        frame = self._end.receive(wait=wait or self.sent > self.received)
        self.received += frame is not None
        return frame

    def send(self, message: bytes) -> None:
        self._end.send(message)

    def close(self) -> None:
        self._end.close()


class Peer:
    """The engine's side, by hand. The server finds a frame as soon as it is sent."""

    def __init__(self, transport: Transport, shared: bool = True, **grammars: ScriptedGrammar) -> None:
        self.frames = _Frames()
        self.actor = ThreadActor(transport, {"g": FAST, **grammars}, shared=shared, wrap=self.frames.received_by)
        self.channel = self.actor.pair.channel
        self.table = self.actor.pair.segment.table
        self.shared = shared

    def send(self, *requests: Request) -> None:
        self.channel.send(encode(list(requests)))
        self.frames.sent += 1

    def fill(self, *slots: int) -> Fill:
        """A request to fill slots. Their columns are written."""
        packed = np.array(slots, np.int32)
        if self.shared:
            return Fill(packed.tobytes())
        return Fill(packed.tobytes(), self.table.target[packed].tobytes(), self.table.tokens[packed].tobytes())

    def open(self, slot: int, text: str = "", grammar: str = "g", edit: int = 1) -> Open:
        """A request to open a sequence; writes its target."""
        self.table.target[slot] = version = edit * EDIT + len(text)
        return Open(slot, version, grammar, None, tokens(text))

    def answer(self, seconds: float = 10.0) -> Answer | None:
        poller = zmq.Poller()
        poller.register(self.channel.socket, zmq.POLLIN)
        if not poller.poll(int(seconds * 1000)):
            return None
        frame = self.channel.receive()
        assert frame is not None
        found: Answer = Decoder(Answer).decode(frame)  # type: ignore[arg-type]
        return found

    def wait(self, slot: int) -> None:
        """Wait until a slot's mask is ready."""
        deadline = time.monotonic() + 10
        while self.table.ready[slot] != self.table.target[slot]:
            assert time.monotonic() < deadline

    def close(self) -> None:
        self.actor.connection.close()


def test_masks_are_written_into_the_table_and_marked_there(transport: Transport) -> None:
    peer = Peer(transport)
    table = peer.table
    peer.send(peer.open(3), peer.open(0, "a"))
    for slot, expected in ((3, "ax"), (0, "bc")):
        peer.wait(slot)
        assert allowed(table.mask[slot]) == expected
        assert table.seconds[slot] > 0
    assert peer.answer(0.05) is None, "the engine does not wait, so it is not woken"
    assert table.mark["busy"][0] == IDLE
    table.tokens[0, :1] = tokens("b")
    table.target[0] += 1
    table.mark["wake"][0] = 1
    peer.send(peer.fill(0))
    assert peer.answer() == Filled(), "the engine waits: it is woken when all is done"
    assert allowed(table.mask[0]) == "."
    assert table.ready[[1, 2, 4]].tolist() == [FREE] * 3
    peer.close()


def test_a_failed_row_is_reported_and_its_slot_is_marked(transport: Transport) -> None:
    peer = Peer(transport)
    peer.send(peer.open(3, "q"))
    answer = peer.answer()
    assert isinstance(answer, Failed)
    assert (answer.slot, answer.version) == (3, peer.table.target[3])
    assert isinstance(from_wire(answer.error), TokenRejected)
    assert peer.table.status[3] == FAILED
    peer.send(Free([3]), peer.open(3, edit=2))
    peer.wait(3)
    assert peer.table.status[3] == OK
    assert allowed(peer.table.mask[3]) == "ax"
    peer.close()


def test_a_failed_row_is_logged_with_its_request(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer(transport)
    peer.send(msgspec.structs.replace(peer.open(3, "q"), request_id="request-7"))
    assert isinstance(peer.answer(), Failed)
    assert "request request-7 (slot 3) failed: token_rejected" in caplog.text
    peer.close()


def test_a_request_that_an_edit_has_overtaken_is_skipped(transport: Transport) -> None:
    slow = SlowGrammar([tokens("abc"), tokens("xyz")], slow_at=0)
    peer = Peer(transport, slow=slow)
    peer.send(peer.open(0, grammar="slow"), peer.open(1))
    assert slow.reached.wait(10)
    peer.table.target[1] = 2 * EDIT + 1  # while slot 1 still waits behind slot 0
    peer.send(Edit(1, 2 * EDIT + 1, 0, tokens("x")))
    slow.release.set()
    peer.wait(1)
    assert allowed(peer.table.mask[1]) == "y"
    peer.close()


def test_a_sequence_that_was_slow_on_another_worker_is_filled_last(transport: Transport) -> None:
    slow = SlowGrammar([tokens("abc"), tokens("xyz")], slow_at=0)
    peer = Peer(transport, slow=slow)
    peer.send(msgspec.structs.replace(peer.open(0, grammar="slow"), seconds=0.5), peer.open(1))
    assert slow.reached.wait(10)
    assert peer.table.ready[1] == peer.table.target[1]
    slow.release.set()
    peer.close()


def test_a_position_that_does_not_fit_the_known_output_is_a_failure(transport: Transport) -> None:
    peer = Peer(transport)
    peer.send(peer.open(0))
    peer.wait(0)
    peer.table.target[0] += 100
    peer.send(peer.fill(0))
    answer = peer.answer()
    assert isinstance(answer, Failed)
    assert isinstance(from_wire(answer.error), BackendError)
    peer.close()


def test_freed_slots_are_acknowledged(transport: Transport) -> None:
    peer = Peer(transport)
    peer.send(peer.open(2))
    peer.wait(2)
    peer.send(Free([2, 5]))
    deadline = time.monotonic() + 10
    while peer.table.ready[2] != freed(peer.table.target[2]):
        assert time.monotonic() < deadline
    assert peer.actor.worker.num_open == 0
    peer.close()


def test_without_shared_memory_changed_lines_are_sent(transport: Transport) -> None:
    peer = Peer(transport, shared=False)
    peer.send(peer.open(3), peer.open(4, "q"))
    found: list[Any] = [peer.answer(), peer.answer()]
    (failed,) = [each for each in found if isinstance(each, Failed)]
    (lines,) = [each for each in found if isinstance(each, Filled)]
    assert failed.slot == 4
    assert np.frombuffer(lines.slots, np.int32).tolist() == [3]
    assert np.frombuffer(lines.ready, np.int64).tolist() == [peer.table.target[3]]
    mask = np.zeros(WORDS, np.int32)
    mask[np.frombuffer(lines.changed, np.int32)] = np.frombuffer(lines.mask, np.int32)
    assert allowed(mask) == "ax"
    assert not peer.table.mask.any()
    peer.send(Free([3]))
    answer = peer.answer()
    assert isinstance(answer, Filled)
    assert np.frombuffer(answer.ready, np.int64).tolist() == [freed(EDIT)]
    assert answer.mask == b""
    peer.close()


@pytest.mark.parametrize(("text", "expected"), [("", "ax"), ("x", "y"), ("xy", "z")])
def test_without_shared_memory_only_changed_words_of_a_mask_are_sent(
    transport: Transport, text: str, expected: str
) -> None:
    peer = Peer(transport, shared=False)
    peer.send(peer.open(3))
    first = peer.answer()
    assert isinstance(first, Filled)
    peer.send(Edit(3, 2 * EDIT + len(text), 0, tokens(text)))
    lines = peer.answer()
    assert isinstance(lines, Filled)
    before, mask = np.zeros(WORDS, np.int32), np.zeros(WORDS, np.int32)
    before[np.frombuffer(first.changed, np.int32)] = np.frombuffer(first.mask, np.int32)
    for sent in (first, lines):
        mask[np.frombuffer(sent.changed, np.int32)] = np.frombuffer(sent.mask, np.int32)
    assert allowed(mask) == expected
    assert np.frombuffer(lines.changed, np.int32).tolist() == np.flatnonzero(mask != before).tolist()
    peer.close()


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"hello", encode([1, 2]), encode([[9, 1]]), encode([["a", 1, [], []]])]
)
def test_a_garbled_frame_is_dropped_and_the_next_one_served(transport: Transport, garbage: bytes) -> None:
    peer = Peer(transport)
    peer.channel.send(garbage)
    peer.send(peer.open(0))
    peer.wait(0)
    assert peer.table.mask.shape == (8, WORDS)
    peer.close()


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_finished_masks_do_not_wait_for_a_slow_one(transport: Transport, shared: bool) -> None:
    slow = SlowGrammar([tokens("abc")], slow_at=0)
    peer = Peer(transport, shared, slow=slow)
    peer.send(peer.open(0), peer.open(1, grammar="slow"), peer.open(2))
    assert slow.reached.wait(10)
    if shared:
        assert (peer.table.ready != FREE).tolist()[:3] == [True, False, False]
        assert peer.table.mark["busy"][0] == 1, "the mark names the slot that is being filled"
        assert peer.table.mark["since"][0] > 0
        slow.release.set()
        peer.wait(2)
    else:
        first = peer.answer()
        assert isinstance(first, Filled)
        assert np.frombuffer(first.slots, np.int32).tolist() == [0]
        slow.release.set()
        rest: list[int] = []
        while len(rest) < 2:
            lines = peer.answer()
            assert isinstance(lines, Filled)
            rest += np.frombuffer(lines.slots, np.int32).tolist()
        assert rest == [1, 2]
    peer.close()


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])
def test_rows_that_were_slow_come_after_those_that_are_asked_for_meanwhile(transport: Transport, shared: bool) -> None:
    first, second = (SlowGrammar([tokens("abc")], slow_at=1) for _ in range(2))
    peer = Peer(transport, shared, first=first, second=second)
    peer.send(peer.open(0, grammar="first"), peer.open(1, grammar="second"), peer.open(2))
    table, deadline = peer.actor.table, time.monotonic() + 10
    while table.ready[2] != EDIT:
        assert time.monotonic() < deadline
    table.seconds[:2] = 0.5
    for slot in range(3):
        peer.table.target[slot], peer.table.tokens[slot, 0] = EDIT + 1, tokens("a")[0]
        peer.send(peer.fill(slot))
        assert first.reached.wait(10)
    first.release.set()
    assert second.reached.wait(10)
    assert table.ready[:3].tolist() == [EDIT + 1, EDIT, EDIT + 1]
    second.release.set()
    peer.close()
