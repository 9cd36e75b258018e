"""What every `MaskPool` promises, of each that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import pytest
from byte_vocabulary import BYTES, STOP, WORDS, allowed, tokens
from driven_pool import copy_masks

from actors import RayPool
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    GuidedError,
    InvalidConstraint,
    InvalidRequest,
    TokenRejected,
    UnsupportedConstraint,
)
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, MaskPool
from guided.sequence import GuidedSequence, VetoReport

LLGUIDANCE = ("llguidance",)
WAIT = 60.0


@pytest.fixture(scope="module", params=["inline", "ray"])
def pool(request: pytest.FixtureRequest) -> Iterator[MaskPool]:
    pool: MaskPool
    if request.param == "inline":
        pool = InlinePool(BYTES, forced_tokens=True)
    else:
        request.getfixturevalue("local_ray")
        pool = RayPool(BYTES, num_actors=2, forced_tokens=True).started()
    yield pool
    pool.shutdown()
    pool.shutdown()


_ids = count(1)


class Driver:
    """Opens sequences of a pool, and takes steps. A row's outcome is its mask, as text,
    or what became of it."""

    def __init__(self, pool: MaskPool) -> None:
        self.pool = pool
        self.bitmask = np.zeros((70, WORDS), np.int32)
        self.sequences: dict[int, GuidedSequence] = {}
        self.seconds = 0.0
        self.vetoes: dict[int, VetoReport] = {}
        """By sequence: what the last step has taken back."""

    def compile(
        self, constraint: Constraint, backends: Sequence[str] = LLGUIDANCE
    ) -> Grammar:
        return self.pool.compile(constraint, backends).result(WAIT)

    def open(
        self,
        grammar: Grammar,
        text: str = "",
        budget: int | None = None,
        final: int | None = None,
    ) -> int:
        sequence = GuidedSequence(
            "request", next(_ids), tokens(text), budget=budget, final=final
        )
        self.sequences[sequence.sequence_id] = sequence
        self.pool.open(sequence, grammar)
        return sequence.sequence_id

    def write(self, sequence_id: int, text: str) -> None:
        """Set a sequence's whole output."""
        self.sequences[sequence_id].output_token_ids = tokens(text)

    def step(self, *sequence_ids: int) -> list[str | GuidedError]:
        """One step of sequences: their masks, or errors."""
        self.pool.submit([self.sequences[each] for each in sequence_ids])
        found = self.pool.collect()
        self.seconds += found.seconds
        assert self.seconds > 0 or not any(len(part.rows) for part in found.ready)
        assert not found.late
        copy_masks(found, self.bitmask)
        self.vetoes = {sequence_ids[row]: veto for row, veto in found.vetoes.items()}
        return [
            found.failed.get(row) or allowed(self.bitmask[row])
            for row in range(len(sequence_ids))
        ]

    def mask(self, sequence_id: int, text: str) -> str:
        """The mask after the output `text`."""
        self.write(sequence_id, text)
        (outcome,) = self.step(sequence_id)
        assert isinstance(outcome, str), outcome
        return outcome


@pytest.fixture
def driver(pool: MaskPool) -> Driver:
    return Driver(pool)


def test_masks_follow_the_tokens(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("ab+c"))
    assert (grammar.backend, grammar.constraint) == (
        "llguidance",
        Constraint.regex("ab+c"),
    )
    sequence = driver.open(grammar)
    # also after many tokens at once
    masks = {"": "a", "a": "b", "ab": "bc", "abbbc": "."}
    assert {text: driver.mask(sequence, text) for text in masks} == masks
    driver.sequences[sequence].output_token_ids = [*tokens("abbbc"), STOP]
    assert driver.step(sequence) == ["."]
    assert driver.step(driver.open(grammar, "a" + 100 * "b")) == ["bc"], (
        "opened in the middle"
    )


def test_a_step_of_many_rows_keeps_their_order(driver: Driver) -> None:
    grammars = [
        driver.compile(Constraint.choice([f"{letter}x", f"{letter}y"]))
        for letter in "abcdefgh"
    ]
    sequences = [driver.open(grammars[index % 8]) for index in range(64)]
    assert driver.step(*sequences) == list("abcdefgh") * 8
    for index, sequence in enumerate(sequences):
        driver.write(sequence, "abcdefgh"[index % 8])
    assert driver.step(*reversed(sequences)) == ["xy"] * 64


def test_the_same_tuple_can_be_submitted_again(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("(abc)*d"))
    ids = [driver.open(grammar) for _ in range(9)]
    batch = tuple(driver.sequences[each] for each in ids)
    for position in range(12):
        driver.pool.submit(batch)
        copy_masks(driver.pool.collect(), driver.bitmask)
        expected = "abc"[position % 3] + ("d" if position % 3 == 0 else "")
        assert [allowed(row) for row in driver.bitmask[:9]] == [expected] * 9
        for sequence in batch:
            sequence.output_token_ids = [
                *sequence.output_token_ids,
                *tokens("abc"[position % 3]),
            ]
        if position == 5:
            driver.pool.free([driver.open(grammar), 10**9])
        if position == 8:  # a step of others between
            assert driver.mask(driver.open(grammar), "ab") == "c"


def test_outputs_that_are_repeated_shorter_or_rolled_back(driver: Driver) -> None:
    sequence = driver.open(driver.compile(Constraint.regex("(ab|cd)*e")))
    for text, mask in (
        ("ab", "ace"),
        ("ab", "ace"),
        ("abc", "d"),
        ("", "ace"),
        ("abc", "d"),
    ):
        assert driver.mask(sequence, text) == mask
    driver.pool.rollback(sequence, 2)
    assert driver.mask(sequence, "aba") == "b"
    driver.write(sequence, "cdc")
    driver.pool.rollback(sequence, 0)
    assert driver.step(sequence) == ["d"]
    driver.pool.rollback(sequence, 1)
    driver.pool.rollback(10**9, 1)
    assert driver.mask(sequence, "cdcdcdcdcdcd") == "ace"


def test_freed_sequences_are_gone_and_the_others_stay(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("ab+c"))
    freed, kept = driver.open(grammar), driver.open(grammar)
    before = sum(worker.open_sequences for worker in driver.pool.status().workers)
    driver.write(freed, "a")
    driver.write(kept, "a")
    assert driver.step(freed, kept) == ["b", "b"]
    driver.pool.free([freed, 10**9])
    assert driver.mask(kept, "ab") == "bc"
    driver.pool.free([kept])
    driver.step()
    assert (
        sum(worker.open_sequences for worker in driver.pool.status().workers) <= before
    )


def test_a_token_that_is_not_allowed_ends_its_row_and_no_other(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("ab+c"))
    wrong, right = driver.open(grammar), driver.open(grammar)
    driver.write(wrong, "x")
    driver.write(right, "a")
    error, mask = driver.step(wrong, right)
    assert isinstance(error, TokenRejected)
    assert mask == "b"
    assert driver.mask(right, "ab") == "bc"
    driver.write(wrong, "a")
    (error,) = driver.step(wrong)
    assert isinstance(error, GuidedError)


def test_equal_constraints_share_one_grammar(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("zy+x"))
    assert driver.compile(Constraint.regex("zy+x")) is grammar
    sequences = [driver.open(grammar, "zy"[:length]) for length in range(3)]
    assert driver.step(*sequences) == ["z", "y", "xy"]


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (lambda: Constraint.regex("a(b"), InvalidConstraint),
        (lambda: Constraint.grammar("start: undefined_rule"), InvalidConstraint),
        (
            lambda: Constraint.json_schema(
                {"contains": {"type": "null"}}, strict_schema=True
            ),
            UnsupportedConstraint,
        ),
    ],
)
def test_what_cant_be_compiled_says_so(
    driver: Driver, constraint: Callable[[], Constraint], error: type[InvalidConstraint]
) -> None:
    for _ in range(2):
        with pytest.raises(error) as caught:
            driver.compile(constraint())
        assert caught.type is error
        assert str(caught.value)


def test_the_next_backend_is_tried_where_the_first_refuses(driver: Driver) -> None:
    constraint = Constraint.json_schema(
        {"type": "array", "items": {"$ref": "#"}}, strict_schema=True
    )
    with pytest.raises(UnsupportedConstraint, match="no schema completely"):
        driver.compile(constraint, ("outlines",))
    grammar = driver.compile(constraint, ("outlines", "llguidance"))
    assert grammar.backend == "llguidance"
    assert "[" in driver.mask(driver.open(grammar), "")


def test_an_empty_step_and_a_sequence_that_was_never_opened(driver: Driver) -> None:
    assert driver.step() == []
    driver.sequences[-1] = GuidedSequence("request", -1, [])
    (error,) = driver.step(-1)
    assert isinstance(error, BackendError)


def test_status_names_the_pool_and_its_workers(driver: Driver) -> None:
    status = driver.pool.status()
    assert status.name in ("inline", "ray")
    assert status.healthy
    assert all(worker.pid and worker.node for worker in status.workers)
    assert driver.pool.vocabulary == BYTES


def test_a_budget_restricts_masks_or_is_refused(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("(a{20}|b+)c"))
    sequence, free = driver.open(grammar, budget=5), driver.open(grammar)
    assert driver.step(sequence, free) == ["b", "ab"]
    assert (driver.sequences[sequence].steered, driver.sequences[free].steered) == (
        True,
        False,
    )
    assert [driver.mask(sequence, "bbbc"[:length]) for length in (1, 2, 3, 4)] == [
        "bc",
        "bc",
        "c",
        ".",
    ]
    (refusal,) = driver.step(
        driver.open(driver.compile(Constraint.regex("a{20}")), budget=20)
    )
    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "max_tokens"
    assert "at least 21" in str(refusal)


def test_tokens_without_an_alternative_come_with_the_mask(driver: Driver) -> None:
    grammar = driver.compile(Constraint.regex("(a|bcde)x[0-9]"))
    first, second = driver.open(grammar), driver.open(grammar)
    driver.step(first, second)
    driver.write(first, "a")
    driver.write(second, "b")
    sequences = [driver.sequences[first], driver.sequences[second]]
    driver.pool.submit(sequences)
    found = driver.pool.collect()
    assert found.forced == {1: tokens("cdex")}, "a single token is sampled as usual"
    driver.write(second, "bcdex")
    assert driver.step(first, second) == ["x", "0123456789"]


def test_a_token_that_violates_a_checked_keyword_is_taken_back(driver: Driver) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    grammar = driver.compile(Constraint.json_schema(schema, whitespace=""))
    vetoed, other = driver.open(grammar, final=0), driver.open(grammar)
    for text, final in (("", 0), ("[", 0), ("[1", 0), ("[1,1", 0)):
        driver.write(vetoed, text)
        driver.write(other, text)
        driver.step(vetoed, other)
        assert driver.sequences[vetoed].final == final
    for text in ("[1,1]", "[1,1,"):
        driver.write(vetoed, text)
        driver.write(other, text)
        masks = driver.step(vetoed, other)
        assert driver.vetoes == {vetoed: VetoReport(4, 0, "uniqueItems")}
        assert not set(str(masks[0])) & set(",]")
        driver.write(vetoed, "[1,1")
        driver.pool.rollback(vetoed, 4)
        assert driver.step(vetoed) == [masks[0]]
    assert driver.mask(vetoed, "[1,12]") == "."
    assert driver.sequences[vetoed].final == 6
    assert driver.sequences[other].final is None
