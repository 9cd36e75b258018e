"""The guided rows of vLLM's batch: a row without a mask allows a stop token only, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from faulty_pool import without_rows
from numpy.typing import NDArray
from scripted_grammar import STOP, ScriptedBackends

from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, InvalidConstraint, WorkerDied
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.integrations.vllm.request_params import GuidedParams
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, MaskPool, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

WIDTH = 40
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)
FREE = "all"


def inline(fail_at: int | None = None) -> InlinePool:
    return InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at))  # type: ignore[arg-type]


class Subject:
    """A masker, and what it reported."""

    def __init__(self, pool: MaskPool | None = None) -> None:
        self.failed: list[tuple[str, GuidedError]] = []
        self.pool = pool or inline()
        self.masker = Masker(self.pool, lambda *report: self.failed.append(report))

    def begin(self, *choices: str, name: str | None = None, waits: bool = True) -> GuidedRequest:
        request = self.masker.begin(name or choices[0], GuidedParams(Constraint.choice(choices)))
        if waits:
            request.compiled.result(60)
        return request

    def step(self, *rows: GuidedRow) -> list[list[int] | str]:
        """Return the allowed tokens of each line; "all" for a line without a constraint."""
        self.masker.prepare(rows)
        bitmask = np.full((1 + max(row.line for row in rows), words(WIDTH)), -1, np.int32)
        self.discarded = self.masker.collect(bitmask, 0.0)
        return [FREE if (line == -1).all() else allowed_ids(line).tolist() for line in bitmask]

    def codes(self) -> list[tuple[str, str]]:
        return [(name, error.code) for name, error in self.failed]


class Broken(InlinePool):
    """Raises exceptions that no pool should raise, in the method that `raises_in` names."""

    raises_in = ""
    late_steps = 0
    """Number of steps in which the first row has no mask."""
    lose_all = False
    """Lose all open sequences, once."""
    released = 0

    def __init__(self) -> None:
        super().__init__(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
        self.opened: set[int] = set()
        self.submitted: list[int] = []

    def release(self, grammar: Grammar) -> None:
        self.released += 1
        super().release(grammar)

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        self.opened.add(sequence.sequence_id)
        super().open(sequence, grammar)

    def failures(self) -> dict[int, GuidedError]:
        lost = self.opened if self.lose_all else set()
        self.lose_all = False
        return dict.fromkeys(lost, WorkerDied("gone"))

    def submit(self, sequences: Sequence[GuidedSequence], new_tokens: NDArray[np.int32] | None = None) -> None:
        if self.raises_in == "submit":
            raise ValueError("out of order")
        self.submitted = [sequence.sequence_id for sequence in sequences]
        super().submit(sequences, new_tokens)

    def collect(self, deadline: float | None = None) -> StepMasks:
        step = super().collect(deadline)
        if self.raises_in == "collect":
            raise ValueError("out of order")
        if self.late_steps:
            self.late_steps -= 1
            return without_rows(step, [0])
        return step

    def decided(self) -> list[int]:
        return self.submitted


class TestRows:
    def test_each_has_its_mask_and_other_lines_are_untouched(self) -> None:
        subject = Subject()
        one, other = subject.begin("12", "19"), subject.begin("345")
        assert subject.step(GuidedRow(other, 3, [3]), GuidedRow(one, 1, [1])) == [FREE, [2, 9], FREE, [4]]
        assert not subject.failed

    def test_an_output_that_has_ended_needs_no_mask(self) -> None:
        """vLLM schedules one step ahead."""
        subject = Subject()
        request = subject.begin("12")
        for tokens in ([1, 2], [1, 2, STOP], [1, 2, STOP, STOP]):
            assert subject.step(GuidedRow(request, 0, tokens)) == [[STOP]]
        assert not subject.failed

    def test_a_step_that_is_not_collected_is_discarded(self) -> None:
        pool = Broken()
        subject = Subject(pool)
        request = subject.begin("123")
        pool.late_steps = 1
        subject.masker.prepare([GuidedRow(request, 0, [1])])
        assert subject.step(GuidedRow(request, 0, [1])) == [[2]]
        assert not subject.failed


class TestFailures:
    def test_a_constraint_that_does_not_compile(self) -> None:
        subject = Subject()
        subject.begin("1")

        def compile_nothing(constraint: object, backends: object) -> Future[object]:
            failed: Future[object] = Future()
            failed.set_exception(InvalidConstraint("no"))
            return failed

        subject.pool.compile = compile_nothing  # type: ignore[method-assign,assignment]
        request = subject.begin("1", name="a", waits=False)
        assert subject.codes() == [("a", "invalid_constraint")]
        assert not request.compiled.done(), "vLLM would schedule the request"

    def test_a_request_that_was_not_admitted(self) -> None:
        subject = Subject()
        params = GuidedParams.from_text("auto")
        assert isinstance(params, InternalError)
        assert not subject.masker.begin("a", params).compiled.done()
        assert subject.codes() == [("a", "internal_error")]

    @pytest.mark.parametrize("raises_in", ["submit", "collect"])
    def test_errors_of_the_pool_fail_the_requests_of_their_step_only(self, raises_in: str) -> None:
        pool = Broken()
        subject = Subject(pool)
        request = subject.begin("123", name="a")
        assert subject.step(GuidedRow(request, 0, [])) == [[1]]
        pool.raises_in = raises_in
        assert subject.step(GuidedRow(request, 0, [1])) == [[STOP]]
        assert subject.codes() == [("a", "internal_error")]
        pool.raises_in = ""
        assert subject.step(GuidedRow(subject.begin("45"), 0, [])) == [[4]]
        assert subject.step(GuidedRow(request, 0, [1])) == [[STOP]]

    def test_a_lost_matcher_fails_an_output_that_is_not_complete(self) -> None:
        """vLLM schedules one step more before it sees the end."""
        pool = Broken()
        subject = Subject(pool)
        done, half = subject.begin("12", name="done"), subject.begin("345", name="half")
        subject.step(GuidedRow(done, 0, [1, 2]), GuidedRow(half, 1, [3]))
        pool.lose_all = True
        assert subject.step(GuidedRow(done, 0, [1, 2, STOP]), GuidedRow(half, 1, [3, 4])) == [[STOP], [STOP]]
        assert subject.codes() == [("half", "worker_died")]

    def test_a_request_that_ends_before_its_step_is_collected(self) -> None:
        pool = Broken()
        subject = Subject(pool)
        one, other = subject.begin("12", name="a"), subject.begin("345")
        subject.masker.prepare([GuidedRow(one, 0, [1]), GuidedRow(other, 1, [3])])
        subject.masker.end(other)
        assert subject.step(GuidedRow(one, 0, [1])) == [[2]]
        subject.masker.end(one)
        assert pool.released == 2
        assert pool.status().workers[0].open_sequences == 0


class TestDrafts:
    @staticmethod
    def rows(request: GuidedRequest, committed: Sequence[int], drafts: Sequence[int]) -> list[GuidedRow]:
        return [GuidedRow(request, count, [*committed, *drafts[:count]], count) for count in range(len(drafts) + 1)]

    def test_one_that_is_not_allowed_fails_no_request(self) -> None:
        subject = Subject()
        request = subject.begin("123456")
        for _ in range(2):
            assert subject.step(*self.rows(request, [1], [2, 9, 4])) == [[2], [3], [STOP], [STOP]]
            assert subject.discarded == {2, 3}
        assert subject.step(*self.rows(request, [1, 2, 3], [4, 5, 6, STOP])) == [[4], [5], [6], [STOP], [STOP]]
        assert subject.discarded == {4}
        assert not subject.failed

    def test_one_with_a_failed_mask_ends_the_request(self) -> None:
        """The draft might be accepted without having been checked."""
        subject = Subject(inline(fail_at=3))
        request = subject.begin("123456", name="a")
        assert subject.step(*self.rows(request, [1], [2, 3])) == [[STOP]] * 3
        assert subject.codes() == [("a", "backend_error")]
