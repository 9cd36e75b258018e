"""The guided rows of an engine's batch: every mask is waited for; a row without one gets one token and is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from faulty_pool import without_rows
from numpy.typing import NDArray
from scripted_grammar import STOP, ScriptedBackends

from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, PoolUnavailable, WorkerDied
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.integrations.vllm.request_params import GuidedParams
from guided.pools.inline import InlinePool
from guided.pools.opening import PoolOpener
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


def inline(fail_at: int | None = None) -> InlinePool:
    return InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at))  # type: ignore[arg-type]


class Subject:
    """A masker, and what it reported."""

    def __init__(self, open_pool: Callable[[], MaskPool] = inline, wait: float = 60.0) -> None:
        self.failed: list[tuple[str, GuidedError]] = []
        self.opener = PoolOpener(open_pool)
        self.masker = Masker(self.opener, lambda *report: self.failed.append(report), WIDTH)
        self.wait = wait

    def begin(self, *choices: str, name: str | None = None) -> GuidedRequest:
        return self.masker.begin(GuidedParams(Constraint.choice(choices)), STOP, name)

    def step(self, *rows: GuidedRow, logits: torch.Tensor | None = None) -> torch.Tensor:
        """One step; the logits come back masked."""
        logits = torch.zeros(1 + max(row.logits_row for row in rows), WIDTH) if logits is None else logits
        assert self.masker.prepare(rows, self.wait)
        self.masker.apply(logits, self.wait)
        return logits

    def codes(self) -> list[tuple[str, str]]:
        return [(name, error.code) for name, error in self.failed]


def allowed(logits: torch.Tensor, row: int) -> list[int]:
    return torch.isfinite(logits[row]).nonzero().flatten().tolist()


def test_each_row_has_its_own_mask_and_others_are_untouched() -> None:
    subject = Subject()
    one, other = subject.begin("12", "19"), subject.begin("345")
    logits = subject.step(GuidedRow(other, 3, [3]), GuidedRow(one, 1, [1]))
    assert (allowed(logits, 1), allowed(logits, 3)) == ([2, 9], [4])
    assert torch.isfinite(logits[[0, 2]]).all()
    assert not subject.failed


def test_the_tokens_of_a_resumed_request_are_replayed() -> None:
    subject = Subject()
    before = subject.begin("1234")
    assert allowed(subject.step(GuidedRow(before, 0, [1, 2])), 0) == [3]
    subject.masker.end(before)
    assert allowed(subject.step(GuidedRow(subject.begin("1234"), 0, [1, 2, 3])), 0) == [4]


def test_a_row_without_a_mask_is_allowed_its_stop_token_and_reported_once_and_the_others_go_on() -> None:
    subject = Subject(lambda: inline(fail_at=2))
    bad, good = subject.begin("1234", name="bad"), subject.begin("567", name="good")
    logits = subject.step(GuidedRow(bad, 0, [1, 2]), GuidedRow(good, 1, [5]))
    assert (allowed(logits, 0), allowed(logits, 1)) == ([STOP], [6])
    assert subject.codes() == [("bad", "backend_error")]
    assert allowed(subject.step(GuidedRow(bad, 0, [1, 2]), GuidedRow(good, 1, [5])), 0) == [STOP]
    assert len(subject.failed) == 1


def test_a_constraint_that_does_not_compile_ends_its_request() -> None:
    subject = Subject()

    def compile_nothing(constraint: object, backends: object) -> Future[object]:
        failed: Future[object] = Future()
        failed.set_exception(InternalError("no"))
        return failed

    subject.step(GuidedRow(subject.begin("1"), 0, []))
    subject.opener.open().result().compile = compile_nothing  # type: ignore[method-assign,assignment]
    assert allowed(subject.step(GuidedRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "internal_error")]


def test_a_request_that_is_invalid_from_the_start_ends() -> None:
    subject = Subject()
    request = subject.masker.begin(PoolUnavailable("not here"), STOP, report_id="a")
    assert allowed(subject.step(GuidedRow(request, 0, [])), 0) == [STOP]
    request = subject.masker.begin(RecursionError("too deep"), STOP, report_id="b")
    assert allowed(subject.step(GuidedRow(request, 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable"), ("b", "internal_error")]


def test_an_output_that_has_ended_needs_no_mask() -> None:
    """The engine schedules one step ahead."""
    subject = Subject()
    request = subject.begin("12", name="a")
    for tokens in ([1, 2], [1, 2, STOP], [1, 2, STOP, STOP]):
        assert allowed(subject.step(GuidedRow(request, 0, tokens)), 0) == [STOP]
    assert not subject.failed


def test_prepare_does_not_wait_before_the_forward_pass() -> None:
    opens = threading.Event()
    subject = Subject(lambda: (opens.wait(60), inline())[1])
    row = GuidedRow(subject.begin("12"), 0, [1])
    assert not subject.masker.prepare([row]), "the pool is being opened"
    opens.set()
    assert allowed(subject.step(row), 0) == [2]
    assert subject.masker.prepare([GuidedRow(row.request, 0, [1, 2])])
    subject.masker.apply(logits := torch.zeros(1, WIDTH), 60)
    assert allowed(logits, 0) == [STOP]


def test_an_unknown_token_is_waited_for_and_never_guessed() -> None:
    subject = Subject()
    tokens = [1, -1]
    row = GuidedRow(subject.begin("123", name="a"), 0, tokens)
    subject.opener.open().result()
    assert not subject.masker.prepare([row])
    tokens[1] = 2  # known after the forward pass
    assert allowed(subject.step(row), 0) == [3]
    tokens += [-1]
    assert allowed(subject.step(row), 0) == [STOP]
    assert subject.codes() == [("a", "internal_error")]
    assert "--logits-processors" in str(subject.failed[0][1])


def test_a_step_that_is_not_applied_is_discarded() -> None:
    subject = Subject()
    request = subject.begin("123")
    row = GuidedRow(request, 2, [1])
    subject.step(GuidedRow(request, 2, []))
    assert subject.masker.prepare([row])
    assert subject.masker.prepare([])
    subject.masker.apply(untouched := torch.zeros(1, WIDTH), 60)
    assert torch.isfinite(untouched).all()
    assert allowed(subject.step(row), 2) == [2]


def test_the_mask_wins_where_the_engine_has_forbidden_all_that_it_allows() -> None:
    subject = Subject()
    banned, ended = subject.begin("12", "19"), subject.begin("34")
    logits = torch.zeros(2, WIDTH)
    logits[0, 2] = logits[1, STOP] = float("-inf")
    subject.step(GuidedRow(banned, 0, [1]), GuidedRow(ended, 1, [3, 4]), logits=logits)
    assert (allowed(logits, 0), allowed(logits, 1)) == ([2, 9], [STOP])
    assert logits[0].softmax(0)[2] == 0, "the other ban holds while another token is left"
    logits = torch.full((1, WIDTH), float("-inf"))
    subject.step(GuidedRow(banned, 0, [1]), logits=logits)
    assert allowed(logits, 0) == [2, 9]


def test_a_failed_row_has_its_stop_token_even_where_that_was_forbidden() -> None:
    subject = Subject(lambda: inline(fail_at=0))
    logits = torch.full((1, WIDTH), float("-inf"))
    subject.step(GuidedRow(subject.begin("1"), 0, []), logits=logits)
    assert allowed(logits, 0) == [STOP]


# several rows per request: drafts


def rows(request: GuidedRequest, committed: Sequence[int], drafts: Sequence[int]) -> list[GuidedRow]:
    return [GuidedRow(request, count, [*committed, *drafts[:count]], count) for count in range(len(drafts) + 1)]


def test_each_draft_has_a_mask_of_its_own_and_rejected_ones_are_taken_back() -> None:
    subject = Subject()
    request = subject.begin("123456", "178956", name="a")
    logits = subject.step(*rows(request, [1], [2, 3]))
    assert [allowed(logits, row) for row in range(3)] == [[2, 7], [3], [4]]
    # 7 was sampled instead of 2; two steps on, the second draft is one again.
    logits = subject.step(*rows(request, [1, 7], [8]))
    assert [allowed(logits, row) for row in range(2)] == [[8], [9]]
    logits = subject.step(*rows(request, [1, 7, 8], [9, 5]))
    assert [allowed(logits, row) for row in range(3)] == [[9], [5], [6]]
    assert not subject.failed


def test_a_draft_that_is_not_allowed_fails_no_request() -> None:
    subject = Subject()
    request = subject.begin("123456", name="a")
    for _ in range(2):
        logits = subject.step(*rows(request, [1], [2, 9, 4]))
        assert [allowed(logits, row) for row in range(4)] == [[2], [3], [STOP], [STOP]]
    logits = subject.step(*rows(request, [1, 2], [3, -1]))
    assert [allowed(logits, row) for row in range(3)] == [[3], [4], [STOP]]
    logits = subject.step(*rows(request, [1, 2, 3], [4, 5, 6, STOP]))
    assert [allowed(logits, row) for row in range(5)] == [[4], [5], [6], [STOP], [STOP]]
    assert not subject.failed


def test_a_draft_with_a_failed_mask_ends_the_request() -> None:
    """The draft might be accepted without having been checked."""
    subject = Subject(lambda: inline(fail_at=3))
    request = subject.begin("123456", name="a")
    logits = subject.step(*rows(request, [1], [2, 3]))
    assert [allowed(logits, row) for row in range(3)] == [[STOP]] * 3
    assert subject.codes() == [("a", "backend_error")]


# several processes


class Pair:
    """Two processes that share masks, as threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.sent: NDArray[np.int32] | None = None

    def rank(self, computes: bool) -> Shared:
        return Shared(self, computes)


class Shared:
    def __init__(self, pair: Pair, computes: bool) -> None:
        self.pair, self.computes = pair, computes

    def share(self, bitmask: NDArray[np.int32]) -> None:
        if self.computes:
            self.pair.sent = bitmask.copy()
        self.pair.barrier.wait()
        if not self.computes:
            assert self.pair.sent is not None
            bitmask[:] = self.pair.sent
        self.pair.barrier.wait()


def test_all_ranks_mask_alike_and_one_opens_the_pool() -> None:
    pair, opened, failed = Pair(), [], []
    results: dict[bool, list[list[int]]] = {}

    def open_pool() -> MaskPool:
        opened.append(inline(fail_at=2))
        return opened[-1]

    def run(computes: bool) -> None:
        masker = Masker(PoolOpener(open_pool), lambda *report: failed.append(report), WIDTH, pair.rank(computes))  # type: ignore[arg-type]
        bad, good, both = (
            masker.begin(GuidedParams(Constraint.choice(choices)), STOP, "x")
            for choices in (["123"], ["45"], ["67", "68"])
        )
        seen = []
        for history in ([], [1], [1, 2], [1, 2, STOP]):
            step = [GuidedRow(bad, 2, history), GuidedRow(good, 0, [4]), GuidedRow(both, 3, [6])]
            masker.prepare(step, 60)
            masker.apply(logits := torch.zeros(4, WIDTH), 60)
            seen += [allowed(logits, row) for row in (2, 0, 3, 1)]
        results[computes] = seen

    threads = [threading.Thread(target=run, args=(computes,)) for computes in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    everything = list(range(WIDTH))
    expected = [row for one in (1, 2, STOP, STOP) for row in ([one], [5], [7, 8], everything)]
    assert results == {True: expected, False: expected}
    assert (len(opened), len(failed)) == (1, 1)


# pools


def test_a_pool_that_cannot_be_opened_fails_requests_and_is_retried_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def open_pool() -> MaskPool:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no memory")
        return inline()

    subject = Subject(open_pool)
    for _ in range(2):
        assert allowed(subject.step(GuidedRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")] * 2
    assert len(tries) == 1
    monkeypatch.setattr("guided.pools.opening._RETRY_SECONDS", -1.0)
    assert allowed(subject.step(GuidedRow(subject.begin("1"), 0, [])), 0) == [1]


def test_a_pool_that_does_not_open_in_time() -> None:
    opens = threading.Event()
    subject = Subject(lambda: (opens.wait(60), inline())[1], wait=0.01)
    assert allowed(subject.step(GuidedRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")]
    opens.set()


def test_a_pool_without_a_thread_to_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", fail)
        request = subject.begin("1", name="a")
        assert allowed(subject.step(GuidedRow(request, 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")]


def test_a_pool_that_is_closed_while_it_opens_is_shut_down() -> None:
    opens, gone = threading.Event(), threading.Event()

    class Pool(InlinePool):
        def shutdown(self) -> None:
            gone.set()

    def open_pool() -> MaskPool:
        opens.wait(60)
        return Pool(VOCABULARY)

    opener = PoolOpener(open_pool)
    opener.open()
    opener.close()
    opens.set()
    assert gone.wait(60)
    with pytest.raises(PoolUnavailable):
        opener.open().result()


class Broken(InlinePool):
    """Raises exceptions that no pool should raise, in the method that `raises_in` names."""

    raises_in = ""
    late_steps = 0
    """Number of steps in which no worker is up for the first row."""
    lose_all = False
    """Lose all open sequences, once."""
    released = 0

    def __init__(self) -> None:
        super().__init__(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
        self.opened: set[int] = set()
        self.late: list[int] = []

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

    def free(self, sequence_ids: Collection[int]) -> None:
        if self.raises_in == "free":
            raise ValueError("out of order")
        super().free(sequence_ids)

    def submit(self, sequences: Sequence[GuidedSequence], new_tokens: NDArray[np.int32] | None = None) -> None:
        if self.raises_in == "submit":
            raise ValueError("out of order")
        self.late = [sequence.sequence_id for sequence in sequences]
        super().submit(sequences, new_tokens)

    def collect(self, deadline: float | None = None) -> StepMasks:
        step = super().collect(deadline)
        if self.raises_in == "collect":
            raise ValueError("out of order")
        if self.raises_in == "no worker":
            return without_rows(step, range(len(self.late)))
        if self.late_steps:
            self.late_steps -= 1
            return without_rows(step, [0])
        return step

    def decided(self) -> list[int]:
        return self.late


@pytest.mark.parametrize("raises_in", ["submit", "collect", "no worker"])
def test_errors_of_the_pool_fail_the_requests_of_their_step_only(raises_in: str) -> None:
    pool = Broken()
    subject = Subject(lambda: pool, wait=0.05)
    request = subject.begin("123", name="a")
    assert allowed(subject.step(GuidedRow(request, 0, [])), 0) == [1]
    pool.raises_in = raises_in
    assert allowed(subject.step(GuidedRow(request, 0, [1])), 0) == [STOP]
    assert subject.codes() == [("a", "mask_timeout" if raises_in == "no worker" else "internal_error")]
    pool.raises_in = ""
    assert allowed(subject.step(GuidedRow(subject.begin("45"), 0, [])), 0) == [4]
    assert allowed(subject.step(GuidedRow(request, 0, [1])), 0) == [STOP]


@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_a_row_waits_for_a_worker(times: int) -> None:
    pool = Broken()
    subject = Subject(lambda: pool)
    one, other = subject.begin("1234", name="one"), subject.begin("567", name="other")
    subject.step(GuidedRow(one, 2, []), GuidedRow(other, 0, []))
    pool.late_steps = times
    logits = subject.step(GuidedRow(one, 2, [1]), GuidedRow(other, 0, [5]))
    assert (allowed(logits, 2), allowed(logits, 0)) == ([2], [6])
    assert not pool.late_steps
    assert not subject.failed
    logits = subject.step(GuidedRow(other, 0, [5, 6]), GuidedRow(one, 1, [1, 2]))
    assert (allowed(logits, 1), allowed(logits, 0)) == ([3], [7])


def test_a_discarded_step_does_not_fail_rows_that_wait_for_a_worker() -> None:
    pool = Broken()
    subject = Subject(lambda: pool)
    request = subject.begin("123", name="a")
    subject.step(GuidedRow(request, 0, []))
    pool.late_steps = 2
    assert subject.masker.prepare([GuidedRow(request, 0, [1])])
    assert allowed(subject.step(GuidedRow(request, 0, [1])), 0) == [2]
    assert not subject.failed


def test_a_matcher_that_is_lost_after_the_output_is_complete_fails_no_request() -> None:
    """The engine schedules one step more before it sees the end."""
    pool = Broken()
    subject = Subject(lambda: pool)
    done, half = subject.begin("12", name="done"), subject.begin("345", name="half")
    subject.step(GuidedRow(done, 0, [1, 2]), GuidedRow(half, 1, [3]))
    pool.lose_all = True
    logits = subject.step(GuidedRow(done, 0, [1, 2, STOP]), GuidedRow(half, 1, [3, 4]))
    assert (allowed(logits, 0), allowed(logits, 1)) == ([STOP], [STOP])
    assert subject.codes() == [("half", "worker_died")]


def test_a_request_that_cannot_be_freed_raises_nothing() -> None:
    pool = Broken()
    subject = Subject(lambda: pool)
    requests = [subject.begin("123", name="a") for _ in range(2)]
    subject.step(*(GuidedRow(request, row, []) for row, request in enumerate(requests)))
    pool.raises_in = "free"
    subject.masker.end(requests[0])
    subject.masker.release(requests[1])
    pool.raises_in = ""
    assert allowed(subject.step(GuidedRow(requests[1], 0, [1])), 0) == [2]


def test_masks_that_cannot_be_written_end_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()
    requests = [subject.begin("123", name="a") for _ in range(2)]
    subject.step(*(GuidedRow(request, row, []) for row, request in enumerate(requests)))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("guided.integrations.vllm.masker.apply_bitmask", fail)
    logits = subject.step(*(GuidedRow(request, row, [1]) for row, request in enumerate(requests)))
    assert [allowed(logits, row) for row in range(2)] == [[STOP], [STOP]]
    assert subject.codes() == [("a", "internal_error")] * 2


def test_a_failed_step_ends_its_requests_only() -> None:
    pool = Broken()
    subject = Subject(lambda: pool)
    bad, other = subject.begin("123", name="bad"), subject.begin("45", name="other")
    subject.step(GuidedRow(bad, 0, []), GuidedRow(other, 1, []))
    subject.masker.prepare([GuidedRow(bad, 1, ())], 60, RuntimeError("no tokens"))
    subject.masker.apply(logits := torch.zeros(2, WIDTH), 60)
    assert allowed(logits, 1) == [STOP]
    assert torch.isfinite(logits[0]).all()
    assert subject.codes() == [("bad", "internal_error")]
    logits = subject.step(GuidedRow(bad, 1, [1]), GuidedRow(other, 0, [4]))
    assert (allowed(logits, 1), allowed(logits, 0)) == ([STOP], [5])
    subject.masker.end(bad)
    subject.masker.end(other)
    assert pool.released == 2
    assert pool.status().workers[0].open_sequences == 0


def test_a_released_request_is_opened_again_from_its_tokens() -> None:
    subject = Subject()
    request = subject.begin("1234")
    subject.step(GuidedRow(request, 0, [1]))
    subject.masker.release(request)
    assert subject.opener.open().result().status().workers[0].open_sequences == 0
    assert allowed(subject.step(GuidedRow(request, 0, [1, 2])), 0) == [3]


def test_a_request_that_ends_before_its_masks_are_applied() -> None:
    subject = Subject(lambda: inline(fail_at=1))
    request, other = subject.begin("12", name="a"), subject.begin("345")
    subject.step(GuidedRow(request, 0, []), GuidedRow(other, 1, []))
    assert subject.masker.prepare([GuidedRow(request, 0, [1])])
    subject.masker.end(other)
    assert subject.codes() == [("a", "backend_error")]
    assert allowed(subject.step(GuidedRow(request, 0, [1])), 0) == [STOP]


# masks that are not waited for


def test_a_late_row_waits_until_its_mask_is_ready() -> None:
    pool = Broken()
    subject = Subject(lambda: pool)
    one, other = subject.begin("123", name="one"), subject.begin("45", name="other")
    subject.step(GuidedRow(one, 0, []), GuidedRow(other, 1, []))
    pool.late_steps = 1
    assert subject.masker.prepare([GuidedRow(one, 0, [1]), GuidedRow(other, 1, [4])])
    masks = subject.masker.collect(0.0, may_be_late=True)
    assert [allowed_ids(row).tolist() for row in masks] == [[STOP], [5]]
    assert one.late <= subject.masker.decided()
    assert not other.late
    assert subject.masker.prepare([GuidedRow(one, 0, [1])])
    assert allowed_ids(subject.masker.collect(0.0, may_be_late=True)[0]).tolist() == [2]
    assert not one.late
    assert not subject.failed


def test_a_row_without_a_grammar_allows_a_stop_token_only() -> None:
    opens = threading.Event()
    subject = Subject(lambda: (opens.wait(60), inline())[1])
    assert not subject.masker.prepare([GuidedRow(subject.begin("12"), 0, [])])
    assert allowed_ids(subject.masker.collect(0.0)[0]).tolist() == [STOP]
    opens.set()


def test_a_request_that_ends_before_the_pool_is_open_is_not_compiled() -> None:
    opens, pool = threading.Event(), Broken()
    subject = Subject(lambda: (opens.wait(60), pool)[1])
    subject.masker.end(subject.begin("12"))
    opens.set()
    assert allowed(subject.step(GuidedRow(subject.begin("34"), 0, [])), 0) == [3]
    assert pool.released == 0
