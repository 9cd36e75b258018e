"""The guided rows of an engine's batch: every mask is waited for, and who has none gets one token and is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scripted import STOP, ScriptedBackends

from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, PoolUnavailable, WorkerDied
from guided.inline import InlinePool
from guided.integrations.pools import Opening
from guided.integrations.vllm.masker import Guest, GuestRow, Masker
from guided.integrations.vllm.request_params import Asked
from guided.pool import Fill, Grammar, MaskPool, Row, StepMasks
from guided.vocabulary import Vocabulary

WIDTH = 40
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)
Reports = list[tuple[str, GuidedError]]


def inline(fail_at: int | None = None) -> InlinePool:
    return InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at))  # type: ignore[arg-type]


class Subject:
    """A masker, and what it reported."""

    def __init__(self, open_pool: Callable[[], MaskPool] = inline, pool_limit: float = 60.0, **limits: float) -> None:
        self.reports: Reports = []
        self.opening = Opening(open_pool)
        self.masker = Masker(
            self.opening,
            lambda request_id, error: self.reports.append((request_id, error)),
            None,
            WIDTH,
            pool_limit=pool_limit,
            **limits,
        )

    def begin(self, *choices: str, name: str | None = None, contested: bool = False) -> Guest:
        return self.masker.begin(Asked(Constraint.choice(choices), request_id=name), STOP, contested)

    def step(self, *rows: GuestRow, logits: torch.Tensor | None = None) -> torch.Tensor:
        """One step; the logits come back masked."""
        logits = torch.zeros(1 + max(row.logits_row for row in rows), WIDTH) if logits is None else logits
        assert self.masker.prepare(rows, wait=True)
        self.masker.apply(logits)
        return logits

    def codes(self) -> list[tuple[str, str]]:
        return [(request_id, error.code) for request_id, error in self.reports]


def allowed(logits: torch.Tensor, row: int) -> list[int]:
    return torch.isfinite(logits[row]).nonzero().flatten().tolist()


def test_each_row_has_its_own_mask_and_others_are_untouched() -> None:
    subject = Subject()
    one, other = subject.begin("12", "19"), subject.begin("345")
    logits = subject.step(GuestRow(other, 3, [3]), GuestRow(one, 1, [1]))
    assert (allowed(logits, 1), allowed(logits, 3)) == ([2, 9], [4])
    assert torch.isfinite(logits[[0, 2]]).all()
    assert not subject.reports


def test_the_tokens_of_a_resumed_request_are_replayed() -> None:
    subject = Subject()
    before = subject.begin("1234")
    assert allowed(subject.step(GuestRow(before, 0, [1, 2])), 0) == [3]
    subject.masker.end(before)
    assert allowed(subject.step(GuestRow(subject.begin("1234"), 0, [1, 2, 3])), 0) == [4]


def test_a_row_without_a_mask_is_allowed_its_stop_token_and_reported_once_and_the_others_go_on() -> None:
    subject = Subject(lambda: inline(fail_at=2))
    sick, well = subject.begin("1234", name="sick"), subject.begin("567", name="well")
    logits = subject.step(GuestRow(sick, 0, [1, 2]), GuestRow(well, 1, [5]))
    assert (allowed(logits, 0), allowed(logits, 1)) == ([STOP], [6])
    assert subject.codes() == [("sick", "backend_error")]
    assert allowed(subject.step(GuestRow(sick, 0, [1, 2]), GuestRow(well, 1, [5])), 0) == [STOP]
    assert len(subject.reports) == 1


def test_a_constraint_that_does_not_compile_ends_its_request() -> None:
    subject = Subject()

    def compile_nothing(constraint: object, backends: object) -> Future[object]:
        failed: Future[object] = Future()
        failed.set_exception(InternalError("no"))
        return failed

    subject.step(GuestRow(subject.begin("1"), 0, []))
    subject.opening.ask().result().compile = compile_nothing  # type: ignore[method-assign,assignment]
    assert allowed(subject.step(GuestRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "internal_error")]


def test_who_was_refused_from_the_start_ends() -> None:
    subject = Subject()
    guest = subject.masker.begin(PoolUnavailable("not here"), STOP, request_id="a")
    assert allowed(subject.step(GuestRow(guest, 0, [])), 0) == [STOP]
    guest = subject.masker.begin(RecursionError("too deep"), STOP, request_id="b")
    assert allowed(subject.step(GuestRow(guest, 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable"), ("b", "internal_error")]


def test_an_output_that_has_ended_is_not_asked_for_again() -> None:
    """The engine schedules one step ahead, and doesn't know yet."""
    subject = Subject()
    guest = subject.begin("12", name="a")
    for tokens in ([1, 2], [1, 2, STOP], [1, 2, STOP, STOP]):
        assert allowed(subject.step(GuestRow(guest, 0, tokens)), 0) == [STOP]
    assert not subject.reports


def test_before_the_forward_pass_nothing_is_waited_for() -> None:
    there = threading.Event()
    subject = Subject(lambda: (there.wait(60), inline())[1])
    row = GuestRow(subject.begin("12"), 0, [1])
    assert not subject.masker.prepare([row]), "the pool is being opened"
    there.set()
    assert allowed(subject.step(row), 0) == [2]
    assert subject.masker.prepare([GuestRow(row.guest, 0, [1, 2])])
    subject.masker.apply(logits := torch.zeros(1, WIDTH))
    assert allowed(logits, 0) == [STOP]


def test_a_token_that_is_not_known_is_waited_for_and_then_never_guessed() -> None:
    subject = Subject()
    tokens = [1, -1]
    row = GuestRow(subject.begin("123", name="a"), 0, tokens)
    subject.opening.ask().result()
    assert not subject.masker.prepare([row])
    tokens[1] = 2  # known after the forward pass
    assert allowed(subject.step(row), 0) == [3]
    tokens += [-1]
    assert allowed(subject.step(row), 0) == [STOP]
    assert subject.codes() == [("a", "internal_error")]
    assert "--logits-processors" in str(subject.reports[0][1])


def test_what_was_prepared_in_vain_is_forgotten() -> None:
    subject = Subject()
    guest = subject.begin("123")
    row = GuestRow(guest, 2, [1])
    subject.step(GuestRow(guest, 2, []))
    assert subject.masker.prepare([row])
    assert subject.masker.prepare([])
    subject.masker.apply(untouched := torch.zeros(1, WIDTH))
    assert torch.isfinite(untouched).all()
    assert allowed(subject.step(row), 2) == [2]


def test_the_mask_wins_where_the_engine_has_forbidden_all_that_it_allows() -> None:
    subject = Subject()
    contested, ended = subject.begin("12", "19", contested=True), subject.begin("34", contested=True)
    logits = torch.zeros(2, WIDTH)
    logits[0, 2] = logits[1, STOP] = float("-inf")
    subject.step(GuestRow(contested, 0, [1]), GuestRow(ended, 1, [3, 4]), logits=logits)
    assert (allowed(logits, 0), allowed(logits, 1)) == ([9], [STOP])
    logits = torch.full((1, WIDTH), float("-inf"))
    subject.step(GuestRow(contested, 0, [1]), logits=logits)
    assert allowed(logits, 0) == [2, 9]


def test_a_failed_row_has_its_stop_token_even_where_that_was_forbidden() -> None:
    subject = Subject(lambda: inline(fail_at=0))
    for contested in (False, True):
        logits = torch.full((1, WIDTH), float("-inf"))
        subject.step(GuestRow(subject.begin("1", contested=contested), 0, []), logits=logits)
        assert allowed(logits, 0) == [STOP]


# several rows a request: drafts


def rows(guest: Guest, committed: Sequence[int], drafts: Sequence[int]) -> list[GuestRow]:
    return [GuestRow(guest, count, [*committed, *drafts[:count]], count) for count in range(len(drafts) + 1)]


def test_each_draft_has_a_mask_of_its_own_and_rejected_ones_are_taken_back() -> None:
    subject = Subject()
    guest = subject.begin("123456", "178956", name="a")
    logits = subject.step(*rows(guest, [1], [2, 3]))
    assert [allowed(logits, row) for row in range(3)] == [[2, 7], [3], [4]]
    # 7 was sampled instead of 2; two steps on, the second draft is one again.
    logits = subject.step(*rows(guest, [1, 7], [8]))
    assert [allowed(logits, row) for row in range(2)] == [[8], [9]]
    logits = subject.step(*rows(guest, [1, 7, 8], [9, 5]))
    assert [allowed(logits, row) for row in range(3)] == [[9], [5], [6]]
    assert not subject.reports


def test_a_draft_that_is_not_allowed_fails_nobody() -> None:
    subject = Subject()
    guest = subject.begin("123456", name="a")
    for _ in range(2):
        logits = subject.step(*rows(guest, [1], [2, 9, 4]))
        assert [allowed(logits, row) for row in range(4)] == [[2], [3], [STOP], [STOP]]
    logits = subject.step(*rows(guest, [1, 2], [3, -1]))
    assert [allowed(logits, row) for row in range(3)] == [[3], [4], [STOP]]
    logits = subject.step(*rows(guest, [1, 2, 3], [4, 5, 6, STOP]))
    assert [allowed(logits, row) for row in range(5)] == [[4], [5], [6], [STOP], [STOP]]
    assert not subject.reports


def test_a_draft_whose_mask_fails_ends_the_request() -> None:
    """It might be accepted, and then nobody would know."""
    subject = Subject(lambda: inline(fail_at=3))
    guest = subject.begin("123456", name="a")
    logits = subject.step(*rows(guest, [1], [2, 3]))
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


def test_all_ranks_mask_alike_and_one_has_the_pool() -> None:
    pair, opened, reports = Pair(), [], []
    results: dict[bool, list[list[int]]] = {}

    def open_pool() -> MaskPool:
        opened.append(inline(fail_at=2))
        return opened[-1]

    def run(computes: bool) -> None:
        masker = Masker(Opening(open_pool), lambda *told: reports.append(told), pair.rank(computes), WIDTH)
        sick, well, both = (
            masker.begin(Asked(Constraint.choice(choices), request_id="x"), STOP)
            for choices in (["123"], ["45"], ["67", "68"])
        )
        seen = []
        for history in ([], [1], [1, 2], [1, 2, STOP]):
            step = [GuestRow(sick, 2, history), GuestRow(well, 0, [4]), GuestRow(both, 3, [6])]
            masker.prepare(step, wait=True)
            masker.apply(logits := torch.zeros(4, WIDTH))
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
    assert (len(opened), len(reports)) == (1, 1)


# pools


def test_a_pool_that_cannot_be_opened_ends_its_requests_and_is_tried_again_later(
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
        assert allowed(subject.step(GuestRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")] * 2
    assert len(tries) == 1
    monkeypatch.setattr("guided.integrations.pools._PAUSE_SECONDS", -1.0)
    assert allowed(subject.step(GuestRow(subject.begin("1"), 0, [])), 0) == [1]


def test_a_pool_that_does_not_open_in_time() -> None:
    there = threading.Event()
    subject = Subject(lambda: (there.wait(60), inline())[1], pool_limit=0.01)
    assert allowed(subject.step(GuestRow(subject.begin("1", name="a"), 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")]
    there.set()


def test_no_thread_to_open_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", fail)
        guest = subject.begin("1", name="a")
        assert allowed(subject.step(GuestRow(guest, 0, [])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable")]


def test_closed_while_it_opens_it_is_shut_down_when_it_comes() -> None:
    there, gone = threading.Event(), threading.Event()

    class Pool(InlinePool):
        def shutdown(self) -> None:
            gone.set()

    def open_pool() -> MaskPool:
        there.wait(60)
        return Pool(VOCABULARY)

    opening = Opening(open_pool)
    opening.ask()
    opening.close()
    there.set()
    assert gone.wait(60)
    with pytest.raises(PoolUnavailable):
        opening.ask().result()


class Broken(InlinePool):
    """Raises what no pool should; `when` says in which of its methods."""

    when = ""
    none_up = 0
    """So many times no worker is there for a step's first row."""
    lost = False
    """All open sequences are, once."""
    released = 0

    def release(self, grammar: Grammar) -> None:
        self.released += 1
        super().release(grammar)

    def failures(self) -> dict[int, GuidedError]:
        gone = list(self._worker._sequences) if self.lost else []
        self.lost = False
        return dict.fromkeys(gone, WorkerDied("gone"))

    def free(self, sequence_ids: Collection[int]) -> None:
        if self.when == "free":
            raise ValueError("out of order")
        super().free(sequence_ids)

    def submit(self, fills: Sequence[Fill]) -> None:
        if self.when == "submit":
            raise ValueError("out of order")
        super().submit(fills)

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> StepMasks:
        step = super().collect(bitmask, timeout, patience)
        if self.when == "collect":
            raise ValueError("out of order")
        if self.when == "no worker":
            for index in range(len(step)):
                step.override(index, Row("unplaced"))
        if self.none_up:
            self.none_up -= 1
            step.override(0, Row("unplaced"))
        return step


def broken() -> Broken:
    return Broken(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]


@pytest.mark.parametrize("contested", [False, True])
@pytest.mark.parametrize("when", ["submit", "collect", "no worker"])
def test_nothing_is_raised_whatever_happens_and_later_requests_start_anew(when: str, contested: bool) -> None:
    pool = broken()
    subject = Subject(lambda: pool, wait_limit=0.05)
    guest = subject.begin("123", name="a", contested=contested)
    assert allowed(subject.step(GuestRow(guest, 0, [])), 0) == [1]
    pool.when = when
    assert allowed(subject.step(GuestRow(guest, 0, [1])), 0) == [STOP]
    assert subject.codes() == [("a", "pool_unavailable" if when == "no worker" else "internal_error")]
    pool.when = ""
    assert allowed(subject.step(GuestRow(subject.begin("45"), 0, [])), 0) == [4]
    assert allowed(subject.step(GuestRow(guest, 0, [1])), 0) == [STOP]


@pytest.mark.parametrize("contested", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_a_row_that_no_worker_is_there_for_is_asked_for_again_until_one_is(times: int, contested: bool) -> None:
    pool = broken()
    subject = Subject(lambda: pool)
    one, other = subject.begin("1234", name="one", contested=contested), subject.begin("567", name="other")
    subject.step(GuestRow(one, 2, []), GuestRow(other, 0, []))
    pool.none_up = times
    logits = subject.step(GuestRow(one, 2, [1]), GuestRow(other, 0, [5]))
    assert (allowed(logits, 2), allowed(logits, 0)) == ([2], [6])
    assert not pool.none_up
    assert not subject.reports
    logits = subject.step(GuestRow(other, 0, [5, 6]), GuestRow(one, 1, [1, 2]))
    assert (allowed(logits, 1), allowed(logits, 0)) == ([3], [7])


def test_what_was_prepared_in_vain_fails_nobody_for_want_of_a_worker() -> None:
    pool = broken()
    subject = Subject(lambda: pool)
    guest = subject.begin("123", name="a")
    subject.step(GuestRow(guest, 0, []))
    pool.none_up = 2
    assert subject.masker.prepare([GuestRow(guest, 0, [1])])
    assert allowed(subject.step(GuestRow(guest, 0, [1])), 0) == [2]
    assert not subject.reports


def test_a_matcher_that_is_lost_once_the_output_is_complete_fails_nobody() -> None:
    """The engine schedules one step more before it sees the end."""
    pool = broken()
    subject = Subject(lambda: pool)
    done, half = subject.begin("12", name="done"), subject.begin("345", name="half")
    subject.step(GuestRow(done, 0, [1, 2]), GuestRow(half, 1, [3]))
    pool.lost = True
    logits = subject.step(GuestRow(done, 0, [1, 2, STOP]), GuestRow(half, 1, [3, 4]))
    assert (allowed(logits, 0), allowed(logits, 1)) == ([STOP], [STOP])
    assert subject.codes() == [("half", "worker_died")]


def test_what_a_guest_held_that_cannot_be_given_back_raises_nothing() -> None:
    pool = broken()
    subject = Subject(lambda: pool)
    guests = [subject.begin("123", name="a") for _ in range(2)]
    subject.step(*(GuestRow(guest, row, []) for row, guest in enumerate(guests)))
    pool.when = "free"
    subject.masker.end(guests[0])
    subject.masker.rest(guests[1])
    pool.when = ""
    assert allowed(subject.step(GuestRow(guests[1], 0, [1])), 0) == [2]


@pytest.mark.parametrize("contested", [False, True])
@pytest.mark.parametrize("where", ["apply_bitmask", "free_what_is_allowed"])
def test_masks_that_cannot_be_written_end_their_requests(
    where: str, contested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject()
    guests = [subject.begin("123", name="a", contested=contested) for _ in range(2)]
    subject.step(*(GuestRow(guest, row, []) for row, guest in enumerate(guests)))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    for module in ("guided.integrations.vllm.masker", "guided.processor"):
        monkeypatch.setattr(f"{module}.{where}", fail, raising=False)
    logits = subject.step(*(GuestRow(guest, row, [1]) for row, guest in enumerate(guests)))
    if where == "free_what_is_allowed" and not contested:
        assert [allowed(logits, row) for row in range(2)] == [[2], [2]]
        return
    assert [allowed(logits, row) for row in range(2)] == [[STOP], [STOP]]
    assert subject.codes() == [("a", "internal_error")] * 2


def test_what_is_broken_off_ends_and_nothing_of_it_stays_open() -> None:
    pool = broken()
    subject = Subject(lambda: pool)
    sick, other = subject.begin("123", name="sick"), subject.begin("45", name="other")
    subject.step(GuestRow(sick, 0, []), GuestRow(other, 1, []))
    subject.masker.break_off([GuestRow(sick, 1, ())], RuntimeError("no tokens"))
    subject.masker.apply(logits := torch.zeros(2, WIDTH))
    assert allowed(logits, 1) == [STOP]
    assert torch.isfinite(logits[0]).all()
    assert subject.codes() == [("sick", "internal_error")]
    assert pool.released == 2
    logits = subject.step(GuestRow(sick, 1, [1]), GuestRow(other, 0, [4]))
    assert (allowed(logits, 1), allowed(logits, 0)) == ([STOP], [5])
    assert pool._worker.num_open == 1


def test_a_guest_that_rests_is_opened_again_from_its_tokens() -> None:
    subject = Subject()
    guest = subject.begin("1234")
    subject.step(GuestRow(guest, 0, [1]))
    subject.masker.rest(guest)
    assert subject.opening.ask().result().status().workers[0].open_sequences == 1, "told with the next step"
    other = subject.begin("5")
    subject.step(GuestRow(other, 0, []))
    assert subject.opening.ask().result().status().workers[0].open_sequences == 1
    assert allowed(subject.step(GuestRow(guest, 0, [1, 2])), 0) == [3]
