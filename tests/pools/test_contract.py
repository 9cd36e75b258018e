"""What every `MaskPool` promises, of each that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import pytest
from byte_vocabulary import BYTES, STOP, WORDS, allowed, tokens

from actors import RayPool
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.inline import InlinePool
from guided.pool import Fill, Grammar, MaskPool, Row

LLGUIDANCE = ("llguidance",)
WAIT = 60.0


@pytest.fixture(scope="module", params=["inline", "ray"])
def pool(request: pytest.FixtureRequest) -> Iterator[MaskPool]:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    pool: MaskPool = RayPool(BYTES, num_actors=2) if request.param == "ray" else InlinePool(BYTES)
    yield pool
    pool.shutdown()
    pool.shutdown()


_ids = count(1)


class Host:
    """A pool, and the rows of one step at a time."""

    def __init__(self, pool: MaskPool) -> None:
        self.pool = pool
        self.bitmask = np.zeros((70, WORDS), np.int32)

    def compile(self, constraint: Constraint, backends: Sequence[str] = LLGUIDANCE) -> Grammar:
        return self.pool.compile(constraint, backends).result(WAIT)

    def open(self, grammar: Grammar, parent: int | None = None) -> int:
        sequence = next(_ids)
        self.pool.open(sequence, grammar, parent)
        return sequence

    def step(self, *fills: tuple[int, int, str | list[int]], timeout: float = WAIT) -> list[Row]:
        """Fill rows: (sequence, start, new text or tokens)."""
        self.pool.submit([Fill(s, start, tokens(new) if isinstance(new, str) else new) for s, start, new in fills])
        found = self.pool.collect(self.bitmask, timeout)
        assert found.seconds > 0 or not any(len(part.rows) for part in found.ready)
        return list(found)

    def mask(self, sequence: int, start: int, new: str | list[int] = "") -> str:
        (row,) = self.step((sequence, start, new))
        assert row.state == "ready", row
        return allowed(self.bitmask[0])


@pytest.fixture
def host(pool: MaskPool) -> Host:
    return Host(pool)


def test_masks_follow_the_tokens(host: Host) -> None:
    grammar = host.compile(Constraint.regex("ab+c"))
    assert (grammar.backend, grammar.constraint) == ("llguidance", Constraint.regex("ab+c"))
    sequence = host.open(grammar)
    assert host.mask(sequence, 0) == "a"
    assert host.mask(sequence, 0, "a") == "b"
    assert host.mask(sequence, 1, "b") == "bc"
    assert host.mask(sequence, 2, "bbc") == "."
    assert host.mask(sequence, 5, [STOP]) == "."


def test_a_step_of_many_rows_keeps_their_order(host: Host) -> None:
    grammars = [host.compile(Constraint.choice([f"{letter}x", f"{letter}y"])) for letter in "abcdefgh"]
    sequences = [host.open(grammars[index % 8]) for index in range(64)]
    rows = host.step(*((sequence, 0, "") for sequence in sequences))
    assert [row.state for row in rows] == ["ready"] * 64
    assert [allowed(row) for row in host.bitmask[:64]] == list("abcdefgh") * 8
    rows = host.step(*((sequences[index], 0, "abcdefgh"[index % 8]) for index in reversed(range(64))))
    assert [allowed(row) for row in host.bitmask[:64]] == ["xy"] * 64


def test_rows_that_are_not_asked_for_stay_untouched(host: Host) -> None:
    sequence = host.open(host.compile(Constraint.regex("[0-9]+")))
    host.bitmask[:] = 7
    host.mask(sequence, 0)
    assert (host.bitmask[1:] == 7).all()


def test_masks_can_be_read_where_they_are_until_the_next_step(host: Host) -> None:
    grammar = host.compile(Constraint.regex("[0-9]+x"))
    sequences = [host.open(grammar) for _ in range(8)]
    for text, expected in (("", "0123456789"), ("1", "0123456789x"), ("1x", ".")):
        host.pool.submit([Fill(sequence, 0, tokens(text)) for sequence in sequences])
        rows = host.pool.collect(None, WAIT)
        assert [row.state for row in rows] == ["ready"] * 8
        assert [allowed(row.mask) for row in rows if row.mask is not None] == [expected] * 8
    (row,) = host.step((sequences[0], 0, "1"))
    assert row.mask is None


def test_an_empty_step(host: Host) -> None:
    assert host.step() == []


def test_rewinding_and_repeating(host: Host) -> None:
    sequence = host.open(host.compile(Constraint.regex("(ab|cd)*e")))
    assert host.mask(sequence, 0, "ab") == "ace"
    assert host.mask(sequence, 0, "ab") == "ace"
    assert host.mask(sequence, 0, "c") == "d"
    assert host.mask(sequence, 0, "cdab") == "ace"


def test_what_the_worker_never_saw_it_asks_for(host: Host) -> None:
    sequence = host.open(host.compile(Constraint.regex("abcd")))
    (row,) = host.step((sequence, 2, "c"))
    assert row.state == "needs_history"
    assert host.mask(sequence, 0, "abc") == "d"


def test_a_fork_has_its_parents_state_and_then_its_own(host: Host) -> None:
    grammar = host.compile(Constraint.regex("a(bc|de)"))
    parent = host.open(grammar)
    host.mask(parent, 0, "a")
    child = host.open(grammar, parent)
    rows = host.step((child, 1, "d"), (parent, 1, "b"))
    assert [row.state for row in rows] == ["ready", "ready"]
    assert [allowed(row) for row in host.bitmask[:2]] == ["e", "c"]


def test_a_fork_of_a_parent_that_is_gone_asks_for_its_history(host: Host) -> None:
    grammar = host.compile(Constraint.regex("a(bc|de)"))
    parent = host.open(grammar)
    host.mask(parent, 0, "a")
    child = host.open(grammar, parent)
    host.pool.free([parent])
    (row,) = host.step((child, 1, "d"))
    assert row.state == "needs_history"
    assert host.mask(child, 0, "ad") == "e"


def test_freed_sequences_are_gone_and_the_others_stay(host: Host) -> None:
    grammar = host.compile(Constraint.regex("ab+c"))
    freed, kept = host.open(grammar), host.open(grammar)
    before = sum(worker.open_sequences for worker in host.pool.status().workers)
    host.step((freed, 0, "a"), (kept, 0, "a"))
    host.pool.free([freed, 10**9])
    assert host.mask(kept, 1, "b") == "bc"
    host.pool.free([kept])
    host.step()
    assert sum(worker.open_sequences for worker in host.pool.status().workers) <= before


def test_a_token_that_is_not_allowed_ends_its_row_and_no_other(host: Host) -> None:
    grammar = host.compile(Constraint.regex("ab+c"))
    wrong, right = host.open(grammar), host.open(grammar)
    rows = host.step((wrong, 0, "x"), (right, 0, "a"))
    assert [row.state for row in rows] == ["failed", "ready"]
    assert isinstance(rows[0].error, TokenRejected)
    assert allowed(host.bitmask[1]) == "b"
    assert host.mask(right, 1, "b") == "bc"
    (row,) = host.step((wrong, 0, "a"))
    assert row.state != "ready"


def test_equal_constraints_share_one_compilation(host: Host) -> None:
    constraint = Constraint.regex("[0-9]{3}-[0-9]{4}")
    first, second = (host.pool.compile(constraint, LLGUIDANCE) for _ in range(2))
    assert first.result(WAIT) is second.result(WAIT)


def test_a_grammar_outlives_its_release_where_somebody_has_it_open(host: Host) -> None:
    grammar = host.compile(Constraint.regex("zy+x"))
    sequence = host.open(grammar)
    assert host.mask(sequence, 0) == "z"
    host.pool.release(grammar)
    assert host.mask(sequence, 0, "z") == "y"
    again = host.compile(Constraint.regex("zy+x"))
    assert host.mask(host.open(again), 0, "zy") == "xy"


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (lambda: Constraint.regex("a(b"), InvalidConstraint),
        (lambda: Constraint.grammar("start: undefined_rule"), InvalidConstraint),
        (lambda: Constraint.json_schema({"type": "array", "uniqueItems": True}), UnsupportedConstraint),
    ],
)
def test_what_cant_be_compiled_says_so(
    host: Host, constraint: Callable[[], Constraint], error: type[InvalidConstraint]
) -> None:
    for _ in range(2):
        with pytest.raises(error) as caught:
            host.compile(constraint())
        assert caught.type is error
        assert str(caught.value)


def test_the_next_backend_is_tried_where_the_first_refuses(host: Host) -> None:
    constraint = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1})
    with pytest.raises(UnsupportedConstraint, match="minProperties"):
        host.compile(constraint, ("llguidance", "outlines"))
    grammar = host.compile(constraint, ("llguidance", "outlines", "xgrammar"))
    assert grammar.backend == "xgrammar"
    assert "{" in host.mask(host.open(grammar), 0)


def test_a_sequence_that_was_never_opened_has_no_mask(host: Host) -> None:
    (row,) = host.step((10**9, 0, ""))
    assert row.state in ("failed", "needs_history")
    assert row.error is None or isinstance(row.error, BackendError)


def test_status_names_the_pool_and_its_workers(host: Host) -> None:
    status = host.pool.status()
    assert status.name in ("inline", "ray")
    assert status.healthy
    assert all(worker.pid and worker.node for worker in status.workers)
    assert host.pool.failures() == {}
    assert host.pool.vocabulary == BYTES
