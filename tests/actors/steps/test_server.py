"""The step server inside an actor: what it accepts, when it answers, which of its
threads does what.

On another node it is the same, with `forward` and `RemoteSteps` between the engine and
its server.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from socket import socket
from typing import Any

import msgspec
import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from msgspec.msgpack import Decoder, encode
from scripted_grammar import ScriptedGrammar, SlowGrammar
from serving import wait_until as until
from thread_cluster import ConnectedPair, ScriptedBackend, ThreadActor, package_of

from actors.mask_actor import Lines, RemoteSteps, forward
from actors.protocol import (
    EDIT,
    FAILED,
    FREE,
    IDLE,
    LOAD,
    OK,
    WAKE,
    Edit,
    Failed,
    Fill,
    Free,
    Open,
    Request,
    SlotTable,
    Unload,
    freed,
    hang_up,
)
from actors.server import StepServer
from guided.errors import BackendError, TokenRejected, from_wire
from guided.masks.worker import MaskWorker

LOST = b"lost"
"""A grammar that cannot be fetched from the object store."""
FAST = ScriptedGrammar([tokens("ab"), tokens("ac"), tokens("xyz")])


class RemoteActor:
    """An actor on another node, in this process."""

    def __init__(self, grammars: dict[str, ScriptedGrammar]) -> None:
        self.pair = ConnectedPair()
        self.server_ended = threading.Event()
        self.has_ended = threading.Event()
        serve = partial(
            StepServer,
            MaskWorker(BYTES),
            {"scripted": ScriptedBackend(grammars)},
            forced_tokens=False,
            give_up=self.server_ended.set,
        )

        def start(
            end: socket, receive_grammar: Callable[[], Any], table: SlotTable
        ) -> None:
            self._server_end = end
            serve(end, receive_grammar, table).start()

        def fetch(references: list[Any]) -> list[Any]:
            if bytes(references[0]) == LOST:
                raise RuntimeError("the object is lost")
            return references

        self.steps = RemoteSteps()
        self.steps.begin(len(self.pair.table.ready), WORDS, start, fetch)
        pair, steps = self.pair, self.steps
        forward(
            pair.end,
            pair.grammars,
            pair.workers_table,
            steps.deliver,
            lambda grammar: steps.load([grammar]),
            self._collect,
        )

    def _collect(self) -> Lines:
        lines = self.steps.collect()
        if self.has_ended.is_set():
            raise RuntimeError("the actor has ended")
        return lines

    def close(self) -> None:
        self.has_ended.set()
        hang_up(self._server_end)
        assert self.server_ended.wait(10)


class Peer:
    """The engine's side, by hand. It loads `grammars`."""

    def __init__(self, pair: ConnectedPair, *grammars: str) -> None:
        self.connection = pair.connection
        self.channel = pair.channel
        self.table = pair.table
        self.numbers = {grammar: number for number, grammar in enumerate(grammars)}
        for grammar in grammars:
            self.channel.send(package_of(grammar), is_grammar=True)

    def send(self, *requests: Request) -> None:
        self.channel.send(encode(list(requests)))

    def open(
        self, slot: int, text: str = "", grammar: str = "g", edit: int = 1
    ) -> Open:
        """A request to open a sequence; writes its target."""
        self.table.target[slot] = version = edit * EDIT + len(text)
        return Open(slot, version, self.numbers[grammar], tokens(text))

    def fill(self, slot: int, text: str) -> Fill:
        """A request to fill a slot after one more token; writes its columns."""
        self.table.target[slot] += 1
        self.table.tokens[slot] = tokens(text)[0]
        return Fill(np.array([slot], np.int32).tobytes())

    def free(self, slot: int) -> Free:
        self.table.target[slot] = freed(int(self.table.target[slot]))
        return Free(slot)

    def answer(self, seconds: float = 10.0) -> Failed | bytes | None:
        poller = select.poll()
        poller.register(self.channel.fd, select.POLLIN)
        if not poller.poll(1000 * seconds):
            return None
        frame = self.channel.receive()
        assert frame is not None
        return WAKE if frame == WAKE else Decoder(Failed).decode(frame)

    def wait(self, slot: int) -> str:
        """Wait until a slot's mask is ready; return what it allows."""
        deadline = time.monotonic() + 10
        while self.table.ready[slot] != self.table.target[slot]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return allowed(self.table.mask[slot])


@pytest.fixture
def slow() -> Iterator[SlowGrammar]:
    """Its mask after one token comes when it is released."""
    grammar = SlowGrammar([tokens("abc"), tokens("xyz")], slow_at=1)
    yield grammar
    grammar.release.set()


@pytest.fixture
def actor(slow: SlowGrammar) -> Iterator[ThreadActor]:
    actor = ThreadActor({"g": FAST, "slow": slow, "new": FAST})
    yield actor
    slow.release.set()
    actor.connection.close()


@pytest.fixture
def peer(actor: ThreadActor) -> Peer:
    """Of an actor beside the engine."""
    return Peer(actor.pair, "g", "slow", "new")


@pytest.fixture
def remote(slow: SlowGrammar) -> Iterator[RemoteActor]:
    actor = RemoteActor({"g": FAST, "slow": slow})
    yield actor
    slow.release.set()
    actor.has_ended.set()
    Peer(actor.pair).channel.send(encode([Unload([])]))  # ends a call of `collect`
    actor.close()
    actor.pair.connection.close()


@pytest.fixture(params=["actor", "remote"])
def either(request: pytest.FixtureRequest) -> Peer:
    """Of an actor beside the engine, and of one on another node."""
    return Peer(request.getfixturevalue(request.param).pair, "g", "slow")


def test_masks_are_written_into_the_table(either: Peer) -> None:
    table = either.table
    either.send(either.open(3), either.open(0, "a"))
    assert either.wait(3) == "ax"
    assert either.wait(0) == "bc"
    assert (table.seconds[[0, 3]] > 0).all()
    assert either.answer(0.05) is None, "the engine does not wait, so it is not woken"
    until(lambda: bool((table.mark["busy"] == IDLE).all()))
    table.wake[0] = 1
    either.send(either.fill(0, "b"))
    assert either.answer() == WAKE, "the engine waits: it is woken when all is done"
    assert either.wait(0) == "."
    assert table.ready[[1, 2, 4]].tolist() == [FREE] * 3
    table.target[3] = 2 * EDIT + 1
    either.send(Edit(3, 2 * EDIT + 1, 0, tokens("a")))
    assert either.wait(3) == "bc"
    either.send(either.free(3), either.open(0, "x", edit=2))
    assert either.wait(0) == "y"
    either.send(either.open(3, "x", edit=3))
    assert either.wait(3) == "y"


def test_a_failed_row_is_reported_and_logged(
    either: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    either.send(
        msgspec.structs.replace(either.open(3, "q"), request_id="request-7"),
        either.open(1),
    )
    either.wait(1)
    answer = either.answer()
    assert isinstance(answer, Failed)
    assert (answer.slot, answer.version) == (3, either.table.target[3])
    assert isinstance(from_wire(answer.error), TokenRejected)
    until(lambda: either.table.status[3] == FAILED)
    assert "request request-7 (slot 3) failed: token_rejected" in caplog.text
    either.send(either.free(3), either.open(3, edit=2))
    assert either.wait(3) == "ax"
    assert either.table.status[[1, 3]].tolist() == [OK, OK]
    assert either.answer(0.05) is None, "it is reported once"


def test_a_position_that_does_not_fit_is_a_failure(peer: Peer) -> None:
    peer.send(peer.open(0))
    peer.wait(0)
    peer.table.target[0] += 99
    peer.send(peer.fill(0, "a"))
    answer = peer.answer()
    assert isinstance(answer, Failed)
    assert isinstance(from_wire(answer.error), BackendError)


# two threads


def stick(peer: Peer, slow: SlowGrammar, other: str = "g") -> None:
    """Have the first thread stuck in the row of slot 0. Another grammar is loaded
    too."""
    peer.send(peer.open(0, grammar="slow"), peer.open(7, grammar=other))
    peer.wait(0), peer.wait(7)
    peer.send(peer.free(7), peer.fill(0, "a"))
    assert slow.reached.wait(10)


def test_quick_rows_do_not_wait_for_a_slow_one(either: Peer, slow: SlowGrammar) -> None:
    stick(either, slow)
    # the mark names the slot of each thread
    until(lambda: 0 in either.table.mark["busy"])
    either.send(either.open(1), either.open(2, "a"))
    assert either.wait(1) == "ax"
    assert either.wait(2) == "bc"
    for text, mask in (("a", "bc"), ("b", ".")):
        either.table.wake[0] = 1
        either.send(either.fill(1, text))
        assert either.wait(1) == mask
        assert either.answer() == WAKE, "woken while the slow row is still missing"
    slow.release.set()
    assert either.wait(0) == "b"


# grammars on their way


def test_a_row_waits_for_its_grammar_and_delays_no_other(either: Peer) -> None:
    either.numbers["later"] = len(either.numbers)
    either.send(either.open(0, grammar="later"), either.open(1))
    assert either.wait(1) == "ax"
    either.send(either.fill(1, "a"))
    assert either.wait(1) == "bc"
    assert either.table.ready[0] == FREE
    either.channel.send(package_of("g"), is_grammar=True)
    assert either.wait(0) == "ax"


def test_a_large_grammar_leaves_no_descriptor(peer: Peer) -> None:
    peer.send(peer.open(0))
    peer.wait(0)
    before = len(os.listdir("/proc/self/fd"))
    peer.numbers["large"] = len(peer.numbers)
    peer.channel.send(package_of("g", size=1 << 20), is_grammar=True)
    peer.send(peer.open(1, grammar="large"))
    assert peer.wait(1) == "ax"
    until(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_a_grammar_that_cannot_be_loaded_fails_its_rows(peer: Peer) -> None:
    peer.numbers["unknown"] = len(peer.numbers)
    peer.channel.send(package_of("unknown"), is_grammar=True)
    peer.send(peer.open(0, grammar="unknown"), peer.open(1))
    assert peer.wait(1) == "ax"
    answer = peer.answer()
    assert isinstance(answer, Failed)
    assert isinstance(from_wire(answer.error), BackendError)


def test_a_grammar_that_is_lost_on_its_way_fails_its_rows(remote: RemoteActor) -> None:
    peer = Peer(remote.pair, "g")
    peer.numbers["lost"] = 1
    peer.channel.send(LOST, is_grammar=True)
    peer.send(peer.open(0, grammar="lost"), peer.open(1))
    answer = peer.answer()
    assert isinstance(answer, Failed)
    assert "the object is lost" in str(from_wire(answer.error))
    assert peer.wait(1) == "ax"


def test_a_grammar_that_is_dropped_on_its_way_serves_its_rows(peer: Peer) -> None:
    number = peer.numbers["later"] = len(peer.numbers)
    peer.send(peer.open(0, grammar="later"), Unload([number]))
    peer.channel.send(package_of("g"), is_grammar=True)
    assert peer.wait(0) == "ax"


def test_the_heartbeat_says_how_long_a_thread_is_busy(
    either: Peer, slow: SlowGrammar
) -> None:
    stick(either, slow)
    mark = either.table.mark
    until(lambda: any(work.wall > 0.3 for work in either.connection.work()))
    [work] = either.connection.work()
    assert (work.phase, work.subject) == ("fill", 0)
    assert work.cpu < work.seconds <= work.wall < 10
    beat = float(mark["beat"][0])
    until(lambda: mark["beat"][0] > beat)


def test_a_heartbeat_that_is_starved_blames_no_row(
    peer: Peer, slow: SlowGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads wait for a CPU; that of the heartbeat waits longest while it reads
    for how long they have."""
    stick(peer, slow)
    calls, since, seconds = count(1), time.monotonic(), [0.0]
    heart = int(peer.table.mark["heart"][0])

    def times(_: object) -> tuple[float, float]:
        waited = time.monotonic() - since
        # the last of its third heartbeat
        if threading.get_native_id() == heart and next(calls) == 4 * 3:
            time.sleep(1.0)
        return 0.0, waited

    def goes_on() -> bool:
        [work] = peer.connection.work()
        seconds.append(work.seconds)
        return work.wall > 1.5

    monkeypatch.setattr("actors.server.thread_times", times)
    until(goes_on)
    assert max(seconds) < 0.5


@pytest.mark.parametrize(
    "grammar", ["new", "slow"], ids=["slow", "of the same grammar"]
)
def test_rows_that_the_second_thread_leaves(
    peer: Peer, slow: SlowGrammar, grammar: str
) -> None:
    stick(peer, slow)
    peer.send(peer.open(1, grammar=grammar), peer.open(2))
    assert peer.wait(2) == "ax"
    time.sleep(0.05)
    assert peer.table.ready[1] == FREE
    slow.release.set()
    assert peer.wait(1) == "ax"


def test_an_edit_of_a_row_that_is_being_filled_follows_it(
    peer: Peer, slow: SlowGrammar
) -> None:
    stick(peer, slow)
    peer.table.target[0] = version = 2 * EDIT + 2
    peer.send(Edit(0, version, 0, tokens("xy")))
    time.sleep(0.05)
    slow.release.set()
    assert peer.wait(0) == "z"


def test_a_slot_is_free_only_after_its_row_was_filled(
    actor: ThreadActor, peer: Peer, slow: SlowGrammar
) -> None:
    stick(peer, slow)
    peer.send(peer.free(0), peer.open(1))
    assert peer.wait(1) == "ax"
    time.sleep(0.05)
    assert peer.table.ready[0] != peer.table.target[0]
    slow.release.set()
    peer.wait(0)
    assert actor.worker.num_open == 1


def test_rows_of_a_grammar_of_the_second_thread_are_all_filled() -> None:
    first, second = (SlowGrammar([tokens("abc")], slow_at=1) for _ in range(2))
    peer = Peer(ThreadActor({"slow": first, "second": second}).pair, "slow", "second")
    stick(peer, first, "second")
    peer.send(peer.open(1, grammar="second"), peer.open(2, grammar="second"))
    peer.wait(1), peer.wait(2)
    peer.send(peer.fill(1, "a"))
    assert second.reached.wait(10)
    peer.send(peer.fill(2, "a"))
    first.release.set()
    peer.wait(0)
    threading.Timer(0.05, second.release.set).start()
    assert peer.wait(1) == peer.wait(2) == "b"
    peer.connection.close()


def test_slow_and_quick_rows_of_one_grammar_are_all_filled(
    peer: Peer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what a row takes: some are slow, some are quick
    monkeypatch.setattr("actors.server.SLOW_SECONDS", 5e-5)
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # threads interrupt each other everywhere
    slots = range(8)
    peer.send(*map(peer.open, slots))
    assert [peer.wait(slot) for slot in slots] == ["ax"] * len(slots)
    for edit in range(2, 3000):
        text, mask = [("", "ax"), ("a", "bc")][edit % 2]
        peer.table.target[slots] = version = edit * EDIT + len(text)
        peer.send(*(Edit(slot, version, 0, tokens(text)) for slot in slots))
        assert [peer.wait(slot) for slot in slots] == [mask] * len(slots)


def test_the_server_ends_with_its_connection(
    actor: ThreadActor, peer: Peer, slow: SlowGrammar
) -> None:
    stick(peer, slow)
    actor.connection.close()
    assert actor.ended.wait(10), "noticed by the second thread"


def test_the_channel_ends_with_an_actor_on_another_node(remote: RemoteActor) -> None:
    remote.has_ended.set()
    peer = Peer(remote.pair, "g")
    peer.send(peer.open(1))
    poller = select.poll()
    poller.register(peer.channel.fd, 0)
    assert poller.poll(10_000), "POLLHUP"


def test_the_mark_of_an_actor_elsewhere_comes_with_its_lines() -> None:
    pair, answers = ConnectedPair(), queue.Queue[Lines]()
    forward(
        pair.end,
        pair.grammars,
        pair.workers_table,
        lambda *_: None,
        lambda *_: None,
        answers.get,
    )
    mark = pair.table.mark.copy()
    mark["busy"][0, LOAD] = 7
    mark.setflags(write=False)  # as Ray returns it
    answers.put(Lines(np.empty(0, np.intp), {}, mark, []))
    until(lambda: [work.subject for work in pair.connection.work()] == [7])
    pair.connection.close()


def test_forwarding_ends_with_the_channel(remote: RemoteActor) -> None:
    before = threading.active_count()
    remote.pair.connection.close()
    until(lambda: threading.active_count() < before)
