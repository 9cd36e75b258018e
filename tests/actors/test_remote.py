"""An actor on another node: for the engine its slot table and its channel are those of a local one."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from driven_pool import until
from msgspec.msgpack import Decoder, encode
from scripted_grammar import ScriptedGrammar, SlowGrammar

from actors.mask_actor import Lines, RemoteSteps, forward
from actors.protocol import (
    EDIT,
    FAILED,
    IDLE,
    OK,
    Channel,
    Edit,
    Failed,
    Fill,
    Free,
    Open,
    Request,
    Segment,
    attach,
    connect,
    freed,
)
from actors.server import StepServer
from guided.backends import Backends
from guided.errors import TokenRejected, from_wire
from guided.worker import MaskWorker

FAST = ScriptedGrammar([tokens("ab"), tokens("ac"), tokens("xyz")])
SLOW = SlowGrammar([tokens("abcde")], slow_at=1)
WAIT = 60.0


class Engine:
    """The engine's side, by hand."""

    def __init__(self, slots: int = 64) -> None:
        self.channel = Channel()
        self.segment = Segment(slots, WORDS)
        self.table = self.segment.table

    def send(self, *requests: Request) -> None:
        self.channel.send(encode(list(requests)))

    def open(self, slot: int, text: str = "", grammar: str = "g", edit: int = 1) -> Open:
        self.table.target[slot] = version = edit * EDIT + len(text)
        return Open(slot, version, grammar, None, tokens(text))

    def fill(self, slots: dict[int, str]) -> Fill:
        for slot, token in slots.items():
            self.table.tokens[slot] = tokens(token)[0]
            self.table.target[slot] += 1
        return Fill(np.array(list(slots), np.int32).tobytes())

    def free(self, slot: int) -> Free:
        self.table.target[slot] = freed(int(self.table.target[slot]))
        return Free(slot, int(self.table.target[slot]))

    def has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self.channel.fd, 0)
        return bool(poller.poll(0))

    def wait(self, *slots: int) -> None:
        at = list(slots)
        until(lambda: bool((self.table.ready[at] == self.table.target[at]).all()), WAIT)

    def answers(self) -> Iterator[Failed | bytes]:
        while (frame := self.channel.receive()) is not None:
            yield Decoder(Failed).decode(frame) if frame else frame


class Actor:
    """The actor's side, in this process."""

    def __init__(self, engine: Engine) -> None:
        worker = MaskWorker(BYTES)
        worker.install("g", FAST)
        worker.install("slow", SLOW)
        self.server_ended = threading.Event()
        serve = partial(StepServer, worker, Backends(BYTES), forced_tokens=False, give_up=self.server_ended.set)
        self.steps = RemoteSteps(len(engine.table.ready), WORDS, lambda *channel: serve(*channel).start())
        self.has_ended = threading.Event()
        table = attach(engine.segment.name)
        assert table is not None
        end = connect(engine.channel.path)
        assert engine.channel.accept(10)
        forward(end, table, self.steps.deliver, self._collect)

    def _collect(self) -> Lines:
        lines = self.steps.collect()
        if self.has_ended.is_set():
            raise RuntimeError("the actor has ended")
        return lines


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.channel.close()
    engine.segment.close()


@pytest.fixture
def actor(engine: Engine) -> Iterator[Actor]:
    actor = Actor(engine)
    yield actor
    actor.has_ended.set()
    engine.send(engine.free(0))  # ends a call of `collect`
    actor.steps.close()
    assert actor.server_ended.wait(10)


def test_lines_come_back_as_a_local_worker_writes_them(engine: Engine, actor: Actor) -> None:
    table = engine.table
    engine.send(engine.open(3), engine.open(0, "a"))
    engine.wait(3, 0)
    assert (allowed(table.mask[3]), allowed(table.mask[0])) == ("ax", "bc")
    assert (table.seconds[[0, 3]] > 0).all()
    table.mark["wake"] = 1
    engine.send(engine.fill({0: "b", 3: "x"}))
    engine.wait(3, 0)
    assert (allowed(table.mask[3]), allowed(table.mask[0])) == ("y", ".")
    until(lambda: list(engine.answers()) == [b""])
    table.target[3] = 2 * EDIT + 1
    engine.send(Edit(3, 2 * EDIT + 1, 0, tokens("a")))
    engine.wait(3)
    assert allowed(table.mask[3]) == "bc"
    engine.send(engine.free(3), engine.free(0))
    engine.wait(3, 0)
    until(lambda: bool((table.mark["busy"] == IDLE).all()))
    engine.send(engine.open(3, "x", edit=3))
    engine.wait(3)
    assert allowed(table.mask[3]) == "y"


def test_a_sequence_that_fails_is_reported_once(engine: Engine, actor: Actor) -> None:
    engine.send(engine.open(2, "q"), engine.open(1))
    engine.wait(1)
    answers: list[Failed | bytes] = []
    until(lambda: bool(answers.extend(engine.answers()) or answers))
    (failed,) = answers
    assert isinstance(failed, Failed)
    assert (failed.slot, failed.version) == (2, EDIT + 1)
    assert isinstance(from_wire(failed.error), TokenRejected)
    assert engine.table.status[[1, 2]].tolist() == [OK, FAILED]
    engine.send(engine.free(2), engine.open(2, "a", edit=2))
    engine.wait(2)
    assert engine.table.status[2] == OK
    assert not list(engine.answers())


def test_ready_lines_do_not_wait_for_a_slow_one(engine: Engine, actor: Actor) -> None:
    engine.send(engine.open(1), engine.open(2, grammar="slow"))
    engine.wait(1, 2)
    engine.send(engine.fill({1: "a", 2: "a"}))
    engine.wait(1)
    assert allowed(engine.table.mask[1]) == "bc"
    assert engine.table.ready[2] != engine.table.target[2]
    until(lambda: engine.table.mark["busy"][0, 0] == 2, 10)
    assert time.monotonic() - engine.table.mark["since"][0, 0] < 10
    engine.send(engine.fill({1: "b"}))
    engine.wait(1)
    SLOW.release.set()
    engine.wait(2)


def test_the_channel_ends_with_the_actor(engine: Engine, actor: Actor) -> None:
    actor.has_ended.set()
    engine.send(engine.open(1))
    until(engine.has_ended)


def test_it_ends_with_the_channel(engine: Engine, actor: Actor) -> None:
    before = threading.active_count()
    engine.channel.close()
    until(lambda: threading.active_count() < before)
