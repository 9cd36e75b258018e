"""Messages that are lost, late, repeated, garbled or from another incarnation; lost shared memory. No mask is ever
wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from actors.rotation import Rotation
from actors.segment import Segment, SegmentName
from byte_vocabulary import WORDS, allowed, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from message_proxy import ProxiedActor, Rule, honest
from scripted_grammar import ScriptedGrammar

from actors import segment as segments
from actors.channel import Transport
from actors.supervision.supervisor import WorkerUp
from guided.constraint import Constraint
from guided.messages import StepAnswer, StepRequest, decoder, encode
from guided.pool import Fill, Grammar, Row

WAIT = 60.0
TEXTS = ["abc", "abd", "xyz"]
WANTS = {"": "ax", "a": "b", "ab": "cd", "abc": ".", "x": "y", "xy": "z"}


class Case:
    """One actor behind a message proxy, and its sequences."""

    def __init__(self, directory: Path, shared: bool) -> None:
        (directory / "s").mkdir()
        self.transport = Transport(str(directory / "s"), "127.0.0.1")
        grammars = {"g": ScriptedGrammar([tokens(text) for text in TEXTS])}
        self.actor = ProxiedActor(self.transport, grammars, directory, shared=shared)
        self.rotation = Rotation(mask_limit=0.8)  # asks again after 0.2 s
        self.rotation.announce(WorkerUp(self.actor.link))
        self.bitmask = np.zeros((8, WORDS), np.int32)

    def open(self, *sequences: int) -> None:
        for sequence in sequences:
            self.rotation.open(sequence, Grammar("g", "scripted", Constraint.json_object(), ("g",)), None)

    def step(self, *fills: tuple[int, str], timeout: float = WAIT) -> list[Row]:
        self.bitmask[:] = 7
        self.rotation.submit([Fill(sequence, 0, tokens(text)) for sequence, text in fills])
        rows = list(self.rotation.collect(self.bitmask, timeout))
        for index, (row, (_, text)) in enumerate(zip(rows, fills, strict=True)):
            if row.state == "ready":
                assert allowed(self.bitmask[index]) == WANTS[text]
            else:
                assert (self.bitmask[index] == 7).all()
        return rows

    def until_ready(self, *fills: tuple[int, str]) -> None:
        """Run steps until all rows are ready, as an engine does: a late row is submitted again when it is settled."""
        deadline = time.monotonic() + WAIT
        while fills:
            assert time.monotonic() < deadline, "no mask in time"
            rows = self.step(*fills, timeout=0.05)
            assert all(row.state in ("ready", "late", "needs_history") for row in rows), rows
            fills = tuple(fill for fill, row in zip(fills, rows, strict=True) if row.state != "ready")
            if fills:
                self.rotation.settled([sequence for sequence, _ in fills], 0.05)

    def all_rows_come_back(self) -> None:
        leases = self.actor.link.leases
        deadline = time.monotonic() + WAIT
        while leases.num_free + sum(each.row >= 0 for each in self.rotation._sequences.values()) < 8:
            assert time.monotonic() < deadline, "rows were lost"
            self.step()
            self.rotation.settled([0], 0.02)

    def close(self) -> None:
        self.actor.request_rule = self.actor.answer_rule = honest
        self.rotation.close()
        self.actor.close()
        self.transport.close()


@pytest.fixture(params=["memory", "tcp"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("c"), request.param == "memory")
    case.open(1, 2)
    yield case
    case.close()


def once(rule: Rule) -> Rule:
    """Apply a rule to the first message, and `honest` to all later ones."""
    used: list[bytes] = []

    def apply(message: bytes) -> Sequence[bytes]:
        used.append(message)
        return rule(message) if len(used) == 1 else [message]

    return apply


def lose(message: bytes) -> Sequence[bytes]:
    return []


def garble(message: bytes) -> Sequence[bytes]:
    return [b"\xc1" + message[1:]]


def truncate(message: bytes) -> Sequence[bytes]:
    return [message[: len(message) // 2]]


def of_an_earlier_incarnation(message: bytes) -> Sequence[bytes]:
    fields = msgspec.msgpack.decode(message)
    return [msgspec.msgpack.encode([fields[0] - 1, *fields[1:]])]


def with_rows_out_of_range(message: bytes) -> Sequence[bytes]:
    """Change the row to one beyond the end, and to one before the start."""
    fields = msgspec.msgpack.decode(message)
    for row in fields[2]:
        at = 1 if len(fields) == 5 else 2
        row[at] = -1 if row[at] % 2 else 10_000
    return [msgspec.msgpack.encode(fields)]


DAMAGE: list[Callable[[bytes], Sequence[bytes]]] = [
    lose,
    garble,
    truncate,
    of_an_earlier_incarnation,
    with_rows_out_of_range,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("way", ["request", "answer"])
def test_what_is_lost_is_asked_for_again(case: Case, damage: Rule, way: str) -> None:
    """No sequence fails for it, and the actor isn't considered hung."""
    case.until_ready((1, "a"), (2, "x"))
    setattr(case.actor, f"{way}_rule", once(damage))
    case.until_ready((1, "ab"), (2, "xy"))
    case.all_rows_come_back()
    assert not case.actor.link.overdue(0.8)
    assert case.rotation.failures() == {}


def test_the_first_message_of_a_sequence_may_be_lost(case: Case) -> None:
    """The message opens the sequence."""
    case.actor.request_rule = once(lose)
    case.until_ready((1, "a"), (2, "x"))


def test_a_repeated_request_is_handled_once(case: Case) -> None:
    """Handling it again would write into rows that other sequences have by then."""
    case.actor.request_rule = lambda message: [message, message]
    answers: list[bytes] = []

    def count(message: bytes) -> Sequence[bytes]:
        answers.append(message)
        return [message]

    case.actor.answer_rule = count
    for text in ("", "a", "ab"):
        case.until_ready((1, text), (2, text))
    numbers = [decoder(StepAnswer).decode(answer).step for answer in answers]
    assert numbers == sorted(set(numbers))


def test_a_repeated_answer_says_nothing_about_a_later_question(case: Case) -> None:
    """Same sequence and position, other tokens: the mask is for a token that was rolled back."""
    answers: list[bytes] = []

    def keep(message: bytes) -> Sequence[bytes]:
        answers.append(message)
        return [message]

    case.actor.answer_rule = keep
    case.until_ready((1, "a"))
    case.rotation.submit([Fill(1, 3, [])])  # sent as a message even with shared memory: the worker lacks that history
    assert [row.state for row in case.rotation.collect(None, WAIT)] == ["needs_history"]
    old = answers[-1]
    case.actor.answer_rule = lambda message: [old, message]
    for text in ("x", "a", "x"):
        case.until_ready((1, text))
    case.all_rows_come_back()


def test_an_old_request_that_comes_late_is_not_handled(case: Case) -> None:
    held: list[bytes] = []

    def hold(message: bytes) -> Sequence[bytes]:
        held.append(message)
        return []

    case.until_ready((1, ""))
    case.actor.request_rule = hold
    assert [row.state for row in case.step((1, "a"), timeout=0.05)] == ["late"]
    case.rotation.free([1])
    case.actor.request_rule = lambda message: [message, *held]
    for _ in range(3):
        case.until_ready((2, "x"))
    assert held
    case.all_rows_come_back()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), shared=st.booleans())
def test_whatever_becomes_of_messages_every_mask_comes_and_is_right(
    seed: int, shared: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case(tmp_path_factory.mktemp("c"), shared)
    draw = random.Random(seed)
    old: dict[str, list[bytes]] = {"request": [], "answer": []}

    def meddling(way: str) -> Rule:
        def apply(message: bytes) -> Sequence[bytes]:
            old[way].append(message)
            fate = draw.random()
            if fate < 0.05:
                return draw.choice(DAMAGE)(message)
            if fate < 0.2:
                return [message, draw.choice(old[way])]
            return [draw.choice(old[way]), message] if fate < 0.3 else [message]

        return apply

    try:
        case.open(*range(1, 5))
        case.actor.request_rule, case.actor.answer_rule = meddling("request"), meddling("answer")
        for _ in range(10):
            case.until_ready(*((sequence, draw.choice(sorted(WANTS))) for sequence in range(1, 5)))
        case.actor.request_rule = case.actor.answer_rule = honest
        case.all_rows_come_back()
    finally:
        case.close()


def test_requests_and_answers_are_told_apart_from_garbage() -> None:
    for kind, message in ((StepRequest, StepRequest(1, 2, [])), (StepAnswer, StepAnswer(1, 2, []))):
        decode = decoder(kind).decode
        assert decode(encode(message)) == message
        for damaged in (garble(encode(message)), truncate(encode(message)), [b""]):
            with pytest.raises(msgspec.MsgspecError):
                decode(damaged[0])


def test_memory_that_is_gone_or_is_another_is_not_attached() -> None:
    """Masks are then sent over TCP (see `Supervisor`). Mapped memory stays mapped after a close on either side."""
    segment = Segment(4, WORDS)
    name = segment.name
    mapped = segments.attach(name)
    assert mapped is not None
    for wrong in (
        SegmentName(name.pid, name.fd, b"x" * 32, name.rows, name.words),
        SegmentName(name.pid, name.fd, name.nonce, name.rows + 1000, name.words),
        SegmentName(1 << 22, name.fd, name.nonce, name.rows, name.words),
        SegmentName(name.pid, 9999, name.nonce, name.rows, name.words),
    ):
        assert segments.attach(wrong) is None
    segment.close()
    assert segments.attach(name) is None
    mapped.masks[:] = 3  # no SIGBUS: the memory exists as long as a process has mapped it
    assert (mapped.masks == 3).all()
