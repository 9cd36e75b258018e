"""The guided rows of vLLM's batch: a row without a mask allows a stop token only, and
the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from byte_vocabulary import LETTERS, STOP
from faulty_pool import FaultyPool

from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.integrations.vllm.request_params import GuidedParams

FREE = "all"


class Subject:
    """A masker, and what it reported."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, GuidedError]] = []
        self.pool = FaultyPool(LETTERS)
        self.masker = Masker(self.pool, lambda *report: self.failed.append(report))

    def admit(self, name: str, params: str) -> GuidedRequest:
        request = GuidedRequest(name)
        self.masker.begin(request, params)
        return request

    def begin(self, *choices: str, name: str | None = None) -> GuidedRequest:
        request = self.admit(
            name or choices[0], GuidedParams(Constraint.choice(choices)).to_text()
        )
        request.compiled.result(60)
        return request

    def step(self, *rows: GuidedRow) -> list[list[int] | str]:
        """Return the allowed tokens of each line; "all" for a line without a
        constraint."""
        self.masker.prepare(rows)
        bitmask = np.full(
            (1 + max(row.line for row in rows), words(LETTERS.padded_vocab_size)),
            -1,
            np.int32,
        )
        self.discarded = self.masker.collect(bitmask, 0.0)
        return [
            FREE if (line == -1).all() else allowed_ids(line).tolist()
            for line in bitmask
        ]

    def codes(self) -> list[tuple[str, str]]:
        return [(name, error.code) for name, error in self.failed]


class TestRows:
    def test_each_has_its_mask_and_other_lines_are_untouched(self) -> None:
        subject = Subject()
        one, other = subject.begin("ab", "ai"), subject.begin("cde")
        assert subject.step(GuidedRow(other, 3, [3]), GuidedRow(one, 1, [1])) == [
            FREE,
            [2, 9],
            FREE,
            [4],
        ]
        assert not subject.failed

    def test_an_output_that_has_ended_needs_no_mask(self) -> None:
        """vLLM schedules one step ahead."""
        subject = Subject()
        request = subject.begin("ab")
        for tokens in ([1, 2], [1, 2, STOP], [1, 2, STOP, STOP]):
            assert subject.step(GuidedRow(request, 0, tokens)) == [[STOP]]
        assert not subject.failed

    def test_a_step_that_is_not_collected_is_discarded(self) -> None:
        subject = Subject()
        request = subject.begin("abc")
        subject.masker.prepare([GuidedRow(request, 0, [1])])
        assert subject.step(GuidedRow(request, 0, [1])) == [[2]]
        subject.masker.prepare([GuidedRow(request, 0, [1, 2])])
        assert subject.masker.decided() == set()
        assert subject.step(GuidedRow(request, 0, [1, 2])) == [[3]]
        assert not subject.failed


class TestFailures:
    def test_a_constraint_that_does_not_compile(self) -> None:
        subject = Subject()
        request = subject.admit(
            "a", GuidedParams(Constraint.regex("a(?=b)c")).to_text()
        )
        assert subject.codes() == [("a", "unsupported_constraint")]
        assert not request.compiled.done(), "vLLM would schedule the request"

    def test_a_request_that_was_not_admitted(self) -> None:
        subject = Subject()
        assert not subject.admit("a", "auto").compiled.done()
        assert subject.codes() == [("a", "internal_error")]

    @pytest.mark.parametrize("raises_in", ["submit", "collect"])
    def test_errors_of_the_pool_fail_the_requests_of_their_step_only(
        self, raises_in: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = Subject()
        request = subject.begin("abc", name="a")
        assert subject.step(GuidedRow(request, 0, [])) == [[1]]
        monkeypatch.setattr(subject.pool, raises_in, None)
        assert subject.step(GuidedRow(request, 0, [1])) == [[STOP]]
        assert subject.codes() == [("a", "internal_error")]
        monkeypatch.undo()
        assert subject.step(GuidedRow(subject.begin("de"), 0, [])) == [[4]]
        assert subject.step(GuidedRow(request, 0, [1])) == [[STOP]]

    def test_a_lost_matcher_fails_an_output_that_is_not_complete(self) -> None:
        """vLLM schedules one step more before it sees the end."""
        subject = Subject()
        done, half = subject.begin("ab", name="done"), subject.begin("cde", name="half")
        subject.step(GuidedRow(done, 0, [1, 2]), GuidedRow(half, 1, [3]))
        for sequence_id in subject.pool.opened:
            subject.pool.lose(sequence_id)
        assert subject.step(
            GuidedRow(done, 0, [1, 2, STOP]), GuidedRow(half, 1, [3, 4])
        ) == [[STOP], [STOP]]
        assert subject.codes() == [("half", "worker_died")]

    def test_a_request_that_ends_before_its_step_is_collected(self) -> None:
        subject = Subject()
        one, other = subject.begin("ab", name="a"), subject.begin("cde")
        subject.masker.prepare([GuidedRow(one, 0, [1]), GuidedRow(other, 1, [3])])
        subject.masker.end(other)
        assert subject.step(GuidedRow(one, 0, [1])) == [[2]]
        subject.masker.end(one)
        assert subject.pool.status().workers[0].open_sequences == 0


class TestDrafts:
    @staticmethod
    def rows(
        request: GuidedRequest, committed: Sequence[int], drafts: Sequence[int]
    ) -> list[GuidedRow]:
        return [
            GuidedRow(request, count, [*committed, *drafts[:count]], count)
            for count in range(len(drafts) + 1)
        ]

    def test_one_that_is_not_allowed_fails_no_request(self) -> None:
        subject = Subject()
        request = subject.begin("abcdef")
        for _ in range(2):
            assert subject.step(*self.rows(request, [1], [2, 9, 4])) == [
                [2],
                [3],
                [STOP],
                [STOP],
            ]
            assert subject.discarded == {2, 3}
        assert subject.step(*self.rows(request, [1, 2, 3], [4, 5, 6, STOP])) == [
            [4],
            [5],
            [6],
            [STOP],
            [STOP],
        ]
        assert subject.discarded == {4}
        assert not subject.failed

    def test_one_with_a_failed_mask_ends_the_request(self) -> None:
        """The draft might be accepted without having been checked."""
        subject = Subject()
        subject.pool.fails = lambda sequence_id, position: position == 3
        request = subject.begin("abcdef", name="a")
        assert subject.step(*self.rows(request, [1], [2, 3])) == [[STOP]] * 3
        assert subject.codes() == [("a", "backend_error")]
