from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scripted_grammar import STOP, ScriptedBackends

from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, MaskTimeout, PoolUnavailable, UnsupportedConstraint, WorkerDied
from guided.inline import InlinePool
from guided.pool import Fill, Grammar, Row, StepMasks
from guided.processor import GuidedRow, LogitPostProcessor
from guided.vocabulary import Vocabulary

WIDTH = 40
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)


def processor(fail_at: int | None = None) -> LogitPostProcessor:
    return LogitPostProcessor(InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at)))  # type: ignore[arg-type]


def allowed(logits: torch.Tensor, row: int) -> list[int]:
    return torch.isfinite(logits[row]).nonzero().flatten().tolist()


def test_a_sequence_is_led_to_its_end_and_the_stop_token() -> None:
    subject = processor()
    assert subject.initialize("r", Constraint.choice(["123", "129"])).result(0).backend == "llguidance"
    tokens: list[int] = []
    seen = []
    for _ in range(4):
        subject.prepare([GuidedRow("r", 1, tokens, 0)])
        logits = torch.zeros(1, WIDTH)
        assert not subject.apply(logits).failed
        seen.append(allowed(logits, 0))
        tokens.append(seen[-1][0])
    assert seen == [[1], [2], [3, 9], [STOP]]


def test_only_constrained_rows_are_written_each_with_its_own_mask() -> None:
    subject = processor()
    subject.initialize("a", Constraint.choice(["12"]))
    subject.initialize("b", Constraint.choice(["34"]))
    subject.prepare([GuidedRow("b", 2, [], 3), GuidedRow("a", 1, [1], 1)])
    logits = torch.zeros(4, WIDTH)
    subject.apply(logits)
    assert [allowed(logits, row) for row in (1, 3)] == [[2], [3]]
    assert torch.isfinite(logits[[0, 2]]).all()


def test_a_failed_row_is_reported_and_not_masked_and_the_others_are() -> None:
    subject = processor(fail_at=1)
    subject.initialize("bad", Constraint.choice(["12"]))
    subject.initialize("good", Constraint.choice(["345"]))
    rows = [GuidedRow("bad", 1, [], 0), GuidedRow("good", 2, [], 1)]
    subject.prepare(rows)
    assert not subject.apply(torch.zeros(2, WIDTH)).failed
    subject.prepare([GuidedRow("bad", 1, [1], 0), GuidedRow("good", 2, [3, 4], 1)])
    logits = torch.zeros(2, WIDTH)
    report = subject.apply(logits)
    assert list(report.failed) == [1]
    assert isinstance(report.failed[1], BackendError)
    assert torch.isfinite(logits[0]).all()
    assert allowed(logits, 1) == [5]


def test_rows_of_requests_that_are_not_ready_are_refused_and_change_nothing() -> None:
    subject = processor()
    subject.initialize("r", Constraint.choice(["12"]))
    good = GuidedRow("r", 1, [], 0)
    with pytest.raises(ValueError, match="'unknown' is not initialized"):
        subject.prepare([good, GuidedRow("unknown", 2, [], 1)])
    subject._requests["slow"] = type(subject._requests["r"])(Future())
    with pytest.raises(ValueError, match="'slow' is still being compiled"):
        subject.prepare([good, GuidedRow("slow", 2, [], 1)])
    subject.prepare([good])
    logits = torch.zeros(1, WIDTH)
    subject.apply(logits)
    assert allowed(logits, 0) == [1]
    subject.free("r")
    with pytest.raises(ValueError, match="'r' is not initialized"):
        subject.prepare([good])


def test_a_batch_without_constraints_touches_nothing() -> None:
    subject = processor()
    subject.prepare([])
    logits = torch.zeros(2, WIDTH)
    report = subject.apply(logits)
    assert torch.isfinite(logits).all()
    assert report.wait_seconds == 0


def test_prepare_and_apply_alternate() -> None:
    subject = processor()
    with pytest.raises(RuntimeError, match="without prepare"):
        subject.apply(torch.zeros(1, WIDTH))
    subject.prepare([])
    with pytest.raises(RuntimeError, match="twice"):
        subject.prepare([])


def test_a_history_that_got_shorter_is_rolled_back() -> None:
    subject = processor()
    subject.initialize("r", Constraint.choice(["123"]))
    for tokens, expected in (([1, 2], 3), ([1], 2), ([], 1)):
        subject.prepare([GuidedRow("r", 1, tokens, 0)])
        logits = torch.zeros(1, WIDTH)
        subject.apply(logits)
        assert allowed(logits, 0) == [expected]


def test_tokens_that_turned_out_otherwise_are_rolled_back() -> None:
    subject = processor()
    subject.initialize("r", Constraint.choice(["1234", "1567"]))
    for tokens, still_true, expected in (([1, 2, 3], 0, 4), ([1, 5, 6], 1, 7), ([1, 5], 2, 6), ([1, 2], 1, 3)):
        subject.rollback(1, still_true)
        subject.prepare([GuidedRow("r", 1, tokens, 0)])
        logits = torch.zeros(1, WIDTH)
        assert not subject.apply(logits).failed
        assert allowed(logits, 0) == [expected]
    subject.rollback(2, 0)


def test_a_fork_takes_over_its_parents_state() -> None:
    subject = processor()
    subject.initialize("r", Constraint.choice(["123", "129"]))
    subject.prepare([GuidedRow("r", 1, [1], 0)])
    subject.apply(torch.zeros(1, WIDTH))
    subject.prepare([GuidedRow("r", 1, [1, 2], 0), GuidedRow("r", 2, [1, 2, 9], 1, parent_id=1)])
    logits = torch.zeros(2, WIDTH)
    subject.apply(logits)
    assert [allowed(logits, row) for row in (0, 1)] == [[3, 9], [STOP]]


def test_a_kind_that_a_named_backend_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedConstraint, match="lm-format-enforcer"):
        processor().initialize("r", Constraint.grammar("start: /a+/"), backend="lm-format-enforcer")


def test_free_closes_matchers_and_is_idempotent() -> None:
    pool = InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["12"]))
    subject.prepare([GuidedRow("r", 1, [], 0), GuidedRow("r", 2, [], 1)])
    subject.apply(torch.zeros(2, WIDTH))
    assert pool.status().workers[0].open_sequences == 2
    subject.free("r")
    subject.free("r")
    subject.prepare([])
    subject.apply(torch.zeros(1, WIDTH))
    subject.initialize("next", Constraint.choice(["12"]))
    subject.prepare([GuidedRow("next", 3, [], 0)])
    subject.apply(torch.zeros(1, WIDTH))
    assert pool.status().workers[0].open_sequences == 1


class FaultyPool(InlinePool):
    """An inline pool whose rows end as told."""

    def __init__(self, state: str | None = None, error: GuidedError | None = None, refuse: bool = False) -> None:
        super().__init__(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
        self.state, self.error, self.refuse = state, error, refuse
        self.lost: dict[int, GuidedError] = {}
        self.submitted: list[list[Fill]] = []

    def open(self, sequence_id: int, grammar: Grammar, parent_id: int | None = None) -> None:
        if self.refuse:
            raise PoolUnavailable("no worker is up")
        super().open(sequence_id, grammar, parent_id)

    def submit(self, fills: Sequence[Fill]) -> None:
        self.submitted.append(list(fills))
        super().submit(fills)

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> StepMasks:
        rows = super().collect(bitmask, timeout, patience)
        if self.state is not None:
            rows.override(0, Row(self.state, 0.0, self.error))  # type: ignore[arg-type]
            self.state = None
        return rows

    def failures(self) -> dict[int, GuidedError]:
        return self.lost


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (FaultyPool("late"), MaskTimeout),
        (FaultyPool("failed", WorkerDied("gone")), WorkerDied),
        (FaultyPool(refuse=True), PoolUnavailable),
    ],
)
def test_every_way_of_losing_a_row_is_reported_under_its_sequence(
    pool: FaultyPool, expected: type[GuidedError]
) -> None:
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["12"]))
    subject.prepare([GuidedRow("r", 1, [], 0)])
    logits = torch.zeros(1, WIDTH)
    report = subject.apply(logits)
    assert isinstance(report.failed[1], expected)
    assert torch.isfinite(logits).all()


def test_a_worker_that_lacks_the_history_is_sent_all_of_it() -> None:
    pool = FaultyPool()
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["123"]))
    subject.prepare([GuidedRow("r", 1, [1], 0)])
    subject.apply(torch.zeros(1, WIDTH))
    pool.state = "needs_history"
    subject.prepare([GuidedRow("r", 1, [1, 2], 0)])
    logits = torch.zeros(1, WIDTH)
    assert not subject.apply(logits).failed
    assert allowed(logits, 0) == [3]
    assert [(fill.start, list(fill.tokens)) for fill in pool.submitted[-1]] == [(0, [1, 2])]


def test_what_is_lost_between_steps_is_reported_under_its_request() -> None:
    pool = FaultyPool()
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["123"]))
    subject.prepare([GuidedRow("r", 1, [], 0)])
    subject.apply(torch.zeros(1, WIDTH))
    pool.lost = {1: WorkerDied("gone"), 99: WorkerDied("somebody else's")}
    assert list(subject.failures()) == ["r"]


def test_a_grammar_still_being_compiled_when_its_request_ends_is_released_later() -> None:
    released: list[Grammar] = []

    class SlowPool(FaultyPool):
        pending: Future[Grammar] = Future()

        def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
            return self.pending

        def release(self, grammar: Grammar) -> None:
            released.append(grammar)

        def free(self, sequence_ids: Collection[int]) -> None:
            assert not sequence_ids

    pool = SlowPool()
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["1"]))
    subject.free("r")
    assert released == []
    grammar = Grammar("k", "llguidance", Constraint.choice(["1"]), ("k",))
    pool.pending.set_result(grammar)
    subject.failures()
    assert released == [grammar]


def test_masks_that_came_before_a_history_was_sent_again_stay_as_they_are() -> None:
    """The second round may use the same memory."""
    pool = FaultyPool()
    subject = LogitPostProcessor(pool)
    subject.initialize("r", Constraint.choice(["123", "456"]))
    subject.prepare([GuidedRow("r", 1, [1], 0), GuidedRow("r", 2, [4], 1)])
    subject.apply(torch.zeros(2, WIDTH))
    pool.state = "needs_history"
    subject.prepare([GuidedRow("r", 1, [1, 2], 0), GuidedRow("r", 2, [4, 5], 1)])
    logits = torch.zeros(2, WIDTH)
    assert not subject.apply(logits).failed
    assert [allowed(logits, row) for row in (0, 1)] == [[3], [6]]


def test_masks_can_be_collected_instead_of_applied() -> None:
    subject = processor(fail_at=1)
    subject.initialize("a", Constraint.choice(["12"]))
    subject.initialize("b", Constraint.choice(["34"]))
    subject.prepare([GuidedRow("b", 2, [], 3), GuidedRow("a", 1, [1], 1)])
    bitmask = np.full((4, 2), -1, np.int32)
    report = subject.collect(bitmask)
    assert list(report.failed) == [1]
    assert bitmask[3].tolist() == [1 << 3, 0]
    assert (bitmask[:3] == -1).all()
    with pytest.raises(RuntimeError, match="without prepare"):
        subject.collect(bitmask)
