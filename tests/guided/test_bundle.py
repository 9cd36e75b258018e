from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from scripted_grammar import STOP, ScriptedBackends

from guided.bundle import ProcessorBundle
from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, UnsupportedConstraint
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar
from guided.post_processor import ApplyReport, LogitPostProcessor, SampledEdit
from guided.processor import GuidedProcessor
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

WIDTH = 40
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)


class Banning(LogitPostProcessor):
    """A post-processor of an application's own: bans a token, is late or fails when told, and notes its calls."""

    max_rollback = 1

    def __init__(self, banned: int | None = None) -> None:
        self.banned = banned
        self.rejects = False
        self.future: Future[Grammar] = Future()
        self.late: list[int] = []
        self.failed: dict[int, GuidedError] = {}
        self.calls: list[Any] = []

    def initialize(self, request_id: str, constraint: Constraint, backend: str = "auto") -> Future[Grammar]:
        if self.rejects:
            raise UnsupportedConstraint("not with me")
        self.calls.append(("initialize", request_id))
        return self.future

    def prepare(self, sequences: Sequence[GuidedSequence], logits_rows: Any = None, new_tokens: Any = None) -> None:
        self.calls.append(("prepare", [sequence.sampling_params for sequence in sequences]))

    def apply(self, logits: torch.Tensor, *options: Any, **named: Any) -> ApplyReport:
        self.calls.append(("finite", torch.isfinite(logits[0]).nonzero().flatten().tolist()))
        if self.banned is not None:
            logits[:, self.banned] = -torch.inf
        return ApplyReport(dict(self.failed), list(self.late), wait_seconds=1.0)

    def decided(self) -> list[int]:
        found, self.late = self.late, []
        return found

    def edits(self, sequences: Sequence[GuidedSequence]) -> dict[int, SampledEdit]:
        self.calls.append(("sampled", *(each.sequence_id for each in sequences)))
        return {each.sequence_id: SampledEdit(rollback=1) for each in sequences if each.output_token_ids[-1] == 3}

    def rollback(self, sequence_id: int, length: int) -> None:
        self.calls.append(("rollback", sequence_id, length))

    def free_sequence(self, sequence_id: int) -> None:
        self.calls.append(("free_sequence", sequence_id))

    def free(self, request_id: str) -> None:
        self.calls.append(("free", request_id))


class Case:
    """A bundle of the standard processor and another one, with one request."""

    def __init__(self, banned: int | None = None) -> None:
        pool = InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
        self.other = Banning(banned)
        self.bundle: LogitPostProcessor = ProcessorBundle(GuidedProcessor(pool), self.other)
        self.sequence = GuidedSequence("r", 1, [], (7, 8), sampling_params="its parameters")

    def initialize(self) -> Future[Grammar]:
        return self.bundle.initialize("r", Constraint.choice(["12", "32", "52"]))

    def apply(self) -> tuple[ApplyReport, list[int]]:
        self.bundle.prepare((self.sequence,))
        logits = torch.zeros(1, WIDTH)
        report = self.bundle.apply(logits)
        return report, torch.isfinite(logits[0]).nonzero().flatten().tolist()


def test_each_member_works_on_the_logits_of_its_predecessor() -> None:
    case = Case(banned=3)
    case.other.future.set_result(Grammar("k", "own", Constraint.choice(["12"]), ("k",)))
    assert case.initialize().result(0).backend == "llguidance", "the first member's grammar is reported"
    report, allowed = case.apply()
    assert allowed == [1, 5]
    assert ("finite", [1, 3, 5]) in case.other.calls
    assert ("prepare", ["its parameters"]) in case.other.calls
    assert report.wait_seconds > 1.0


def test_a_request_is_initialized_when_every_member_has_done_so() -> None:
    case = Case()
    future = case.initialize()
    assert not future.done()
    case.other.future.set_exception(UnsupportedConstraint("not with me"))
    with pytest.raises(UnsupportedConstraint, match="not with me"):
        future.result(0)


def test_a_row_is_late_or_failed_if_it_is_so_in_one_member() -> None:
    case = Case()
    case.other.future.set_result(Grammar("k", "own", Constraint.choice(["12"]), ("k",)))
    case.initialize()
    case.other.late = [1]
    assert case.apply()[0].late == [1]
    assert case.bundle.decided() == [1]
    assert case.apply()[0].late == []
    case.other.failed, case.other.late = {1: BackendError("no")}, [1]
    report, _ = case.apply()
    assert list(report.failed) == [1]
    assert report.late == []


def test_a_request_that_one_member_rejects_is_freed() -> None:
    first, second = Banning(), Banning()
    second.rejects = True
    with pytest.raises(UnsupportedConstraint):
        ProcessorBundle(first, second).initialize("r", Constraint.choice(["12"]))
    assert first.calls == [("initialize", "r"), ("free", "r")]


def test_a_member_changes_outputs() -> None:
    case = Case()
    case.other.future.set_result(Grammar("k", "own", Constraint.choice(["12"]), ("k",)))
    case.initialize()
    assert case.bundle.max_rollback == 1
    case.apply()
    case.sequence.output_token_ids = [1]
    assert case.bundle.edits((case.sequence,)) == {}
    case.apply()
    case.sequence.output_token_ids = [1, 3]
    assert case.bundle.edits((case.sequence,)) == {1: SampledEdit(rollback=1)}
