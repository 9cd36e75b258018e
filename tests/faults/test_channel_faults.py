"""Garbage on the step channel, peers that do not read, lost connections, lost shared memory. No mask is ever wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from byte_vocabulary import WORDS, tokens
from cutting_proxy import CuttingProxy, Way
from driven_pool import until
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from numpy.typing import NDArray
from scripted_grammar import ScriptedGrammar
from slow_grammar import SlowGrammar
from step_driver import WAIT, StepDriver
from thread_actor import ConnectedPair, ThreadActor, close_all

from actors.channel import Address, Transport
from actors.steps import Dispatcher
from actors.steps.placement import WorkerDown, WorkerUp
from actors.steps.protocol import EDIT, Answer, Failed, Fill, Filled, Open, Segment, SegmentName, attach
from guided.errors import GuidedError, WorkerDied, to_wire

LONG = "a" * 3000
SENTENCES = [tokens(text) for text in ("abc", "abd", "xyz", LONG)]
MASKS = {"": "ax", "a": "ab", "ab": "cd", "abc": ".", "x": "y", "xy": "z"}
GARBAGE = [b"", b"\xc1", b"hello", encode([1, 2]), encode([["a", 1]]), encode([Open(0, 1, "g", None, [])])[:-3]]
both_tables = pytest.mark.parametrize("shared", [True, False], ids=["memory", "tcp"])


@pytest.fixture
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    transport = Transport(str(tmp_path_factory.mktemp("s")), "127.0.0.1")
    yield transport
    close_all()
    transport.close()


class Case(StepDriver):
    """A dispatcher. Its actors know the grammars `fast` and `slow`; `slow` blocks the worker at its second mask."""

    def __init__(self, transport: Transport, max_replays: int = 0) -> None:
        self.dispatcher = Dispatcher(mask_limit=60.0, pool_wait=60.0, max_replays=max_replays)
        super().__init__(self.dispatcher)
        self.transport = transport
        self.slow = SlowGrammar(SENTENCES, slow_at=1)

    def join(
        self, shared: bool = True, proxy: tuple[Path, int] | None = None
    ) -> tuple[ThreadActor, list[CuttingProxy]]:
        """Add an actor, which may be connected through a proxy (its directory, and its maximum piece)."""
        proxies: list[CuttingProxy] = []

        def through(address: Address) -> Address:
            if proxy is not None:
                proxies.append(CuttingProxy(address, *proxy))
                return proxies[0].address
            return address

        grammars = {"fast": ScriptedGrammar(SENTENCES), "slow": self.slow}
        actor = ThreadActor(self.transport, grammars, shared=shared, through=through)
        self.dispatcher.announce(WorkerUp(actor.connection))
        return actor, proxies

    def close(self) -> None:
        self.slow.release.set()
        self.dispatcher.close()


@both_tables
def test_garbage_is_dropped_and_the_next_frame_is_served(transport: Transport, shared: bool) -> None:
    case = Case(transport)
    actor, _ = case.join(shared)
    case.open(1, grammar="slow")
    case.open(2)
    assert case.step((1, ""), (2, "")) == ["ax", "ax"]
    case.submit((1, "a"))
    assert case.slow.reached.wait(WAIT)
    for garbage in GARBAGE:
        actor.pair.channel.send(garbage)
        actor.pair.end.send(garbage)  # the server's thread is in a mask: the socket is free
    assert case.step((1, "a"), (2, "x"), timeout=0.05) == ["late", "late"]
    case.slow.release.set()
    assert case.collect() == ["ab", "y"]
    assert case.step((1, "ab"), (2, "xy")) == ["cd", "z"]
    assert not actor.ended.is_set()
    assert case.dispatcher.failures() == {}
    case.close()


@pytest.mark.parametrize("slots", [b"odd", np.array([10_000], np.int32).tobytes()], ids=["no array", "no such slot"])
def test_a_request_that_cannot_be_handled_ends_the_worker(transport: Transport, slots: bytes) -> None:
    case = Case(transport)
    actor, _ = case.join()
    case.open(1)
    assert case.step((1, "")) == ["ax"]
    actor.pair.channel.send(encode([Fill(slots)]))
    assert actor.ended.wait(WAIT)
    until(actor.pair.channel.is_disconnected)
    case.dispatcher.announce(WorkerDown(actor.connection, WorkerDied("it ended")))
    (error,) = case.step((1, "a"))
    assert isinstance(error, WorkerDied)
    case.close()


class WorkerByHand:
    """The actor's end of a connection, without a server: the test writes the answers."""

    def __init__(self, transport: Transport, case: Case, shared: bool) -> None:
        self.pair = ConnectedPair(transport, shared=shared)
        self.pair.installed.add("fast")
        self.connection = self.pair.connection
        self.table = self.connection.table
        self._shared = shared
        case.dispatcher.announce(WorkerUp(self.connection))

    def slot(self, number: int) -> int:
        (slot,) = [slot for slot, state in self.connection.sequences.items() if state.sequence_id == number]
        return slot

    def send(self, answer: Answer) -> None:
        self.pair.end.send(encode(answer))

    def fill(self, slot: int, version: int, mask: NDArray[np.int32]) -> None:
        """Answer with a mask."""
        if self._shared:
            self.table.mask[slot] = mask
            self.table.ready[slot] = version
        else:
            slots, ready, seconds = np.array([slot], np.int32), np.array([version]), np.zeros(1, np.float32)
            columns = slots, ready, seconds, np.arange(len(mask), dtype=np.int32), mask
            self.send(Filled(*(column.tobytes() for column in columns)))


@both_tables
def test_answers_about_old_versions_and_other_slots_change_nothing(transport: Transport, shared: bool) -> None:
    case = Case(transport)
    worker = WorkerByHand(transport, case, shared)
    case.open(1, 2)
    assert case.step((1, "a"), (2, "x"), timeout=0.02) == ["late", "late"]
    slot, other = worker.slot(1), worker.slot(2)
    wrong, right = np.full(WORDS, -1, np.int32), np.zeros(WORDS, np.int32)
    right.view(np.uint32)[tokens("b")[0] // 32] = 1 << tokens("b")[0] % 32
    old = int(worker.table.target[slot])
    case.dispatcher.rollback(1, 0)
    case.step((1, "x"), timeout=0.0)
    case.dispatcher.rollback(1, 0)
    assert case.step((1, "a"), timeout=0.02) == ["late"], "the same tokens as at first, and another version"
    version = int(worker.table.target[slot])
    error = to_wire(WorkerDied("no"))
    for failed in (Failed(slot, old, error), Failed(slot, version + EDIT, error), Failed(-1, version, error)):
        worker.send(failed)
    worker.send(Failed(7, int(worker.table.target[7]), error))
    for each in (old, version - 1, version + 1, version + EDIT):
        worker.fill(slot, each, wrong)
        worker.fill(7, each, wrong)
        assert case.step((1, "a"), (2, "x"), timeout=0.02) == ["late", "late"]
    worker.fill(slot, version, right)
    worker.send(Failed(other, int(worker.table.target[other]), error))
    mask, failure = case.step((1, "a"), (2, "x"))
    assert mask == "b"
    assert isinstance(failure, WorkerDied)
    worker.pair.end.close()
    case.close()
    worker.pair.close()


@both_tables
def test_a_worker_that_does_not_read_does_not_block_the_engine(transport: Transport, shared: bool) -> None:
    """More than its socket takes is kept, and is sent when it reads again."""
    case = Case(transport)
    case.join(shared)
    case.open(1, grammar="slow")
    case.open(2)
    assert case.step((1, ""), (2, "")) == ["ax", "ax"]
    case.submit((1, "a"))
    assert case.slow.reached.wait(WAIT)
    slowest = 0.0
    for _ in range(500):
        case.dispatcher.rollback(2, 0)
        started = time.monotonic()
        case.submit((2, LONG))
        slowest = max(slowest, time.monotonic() - started)
        assert case.collect(0.0) == ["late"]
    assert slowest < 2.0
    case.slow.release.set()
    assert case.step((1, "a"), (2, LONG)) == ["ab", "."]
    case.close()


class CutCase(Case):
    """Sequences on three actors. The connection of the first is cut while masks are asked for."""

    def __init__(self, transport: Transport, directory: Path, shared: bool, max_replays: int, piece: int) -> None:
        super().__init__(transport, max_replays)
        self.actor, (self.proxy,) = self.join(shared, (directory, piece))
        for _ in range(2):
            self.join()
        self.open(*range(1, 7))
        self.running = set(range(1, 7))
        self.is_down = False

    def notice_the_end(self) -> None:
        """What the actor's supervisor does."""
        if not self.is_down and self.actor.pair.channel.is_disconnected():
            self.is_down = True
            self.dispatcher.announce(WorkerDown(self.actor.connection, WorkerDied("the connection is lost")))

    def run(self, rows: dict[int, str]) -> None:
        """Run steps until every row is decided. Each mask is that of its output."""
        deadline = time.monotonic() + WAIT
        for number in rows:
            self.dispatcher.rollback(number, 0)
        while rows:
            assert time.monotonic() < deadline
            found = self.step(*rows.items(), timeout=0.05)
            self.notice_the_end()
            for (number, text), outcome in zip(rows.items(), found, strict=True):
                if isinstance(outcome, GuidedError):
                    assert isinstance(outcome, WorkerDied)
                    assert self.is_down
                    self.running.discard(number)
                else:
                    assert outcome in ("late", MASKS[text])
            rows = {number: text for (number, text), each in zip(rows.items(), found, strict=True) if each == "late"}


@settings(max_examples=30, deadline=None)
@given(
    shared=st.booleans(),
    way=st.sampled_from(["requests", "answers"]),
    after=st.integers(0, 600),
    piece=st.sampled_from([1, 7, 1 << 16]),
    max_replays=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)
def test_a_connection_cut_at_any_byte_is_a_dead_worker_and_never_a_wrong_mask(
    shared: bool,
    way: Way,
    after: int,
    piece: int,
    max_replays: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    draw = random.Random(seed)
    directory = tmp_path_factory.mktemp("c")
    (directory / "s").mkdir()
    transport = Transport(str(directory / "s"), "127.0.0.1")
    case = CutCase(transport, directory, shared, max_replays, piece)
    try:
        case.run(dict.fromkeys(case.running, ""))
        there = {state.sequence_id for state in case.actor.connection.sequences.values()}
        assert there
        case.proxy.cut_after(after, way)
        for _ in range(8):
            case.run({number: draw.choice(list(MASKS)) for number in sorted(case.running)})
        case.proxy.close()
        until(lambda: case.notice_the_end() or case.is_down)
        case.run({number: draw.choice(list(MASKS)) for number in sorted(case.running)})
        assert case.running >= set(range(1, 7)) - (set() if max_replays else there)
        if shared:
            assert case.actor.ended.wait(WAIT), "the worker's process ends too"
    finally:
        case.proxy.close()
        case.close()
        close_all()
        transport.close()


def test_memory_that_is_gone_or_is_another_is_not_attached() -> None:
    """Masks are then sent over TCP (see `Supervisor`). Mapped memory stays mapped after a close on either side."""
    segment = Segment(4, WORDS)
    name = segment.name
    mapped = attach(name)
    assert mapped is not None
    for wrong in (
        SegmentName(name.pid, name.fd, b"x" * 32, name.slots, name.words),
        SegmentName(name.pid, name.fd, name.nonce, name.slots + 1000, name.words),
        SegmentName(1 << 22, name.fd, name.nonce, name.slots, name.words),
        SegmentName(name.pid, 9999, name.nonce, name.slots, name.words),
    ):
        assert attach(wrong) is None
    segment.close()
    assert attach(name) is None
    mapped.mask[:] = 3  # no SIGBUS: the memory exists as long as a process has mapped it
    assert (mapped.mask == 3).all()
