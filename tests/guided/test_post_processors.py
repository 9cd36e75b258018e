from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from byte_vocabulary import LETTERS

from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, UnsupportedConstraint
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import ApplyReport, LogitPostProcessor
from guided.processors.post_processors import PostProcessors
from guided.processors.rfc_5423 import RFC5423Adapter
from guided.sequence import GuidedSequence


class Own(LogitPostProcessor):
    """A post-processor of an application's own: is late, fails or rejects when told,
    and notes what it frees."""

    def __init__(self, rejects: bool = False) -> None:
        self.rejects = rejects
        self.late: list[int] = []
        self.failed: dict[int, GuidedError] = {}
        self.freed: list[str] = []

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto"
    ) -> Future[Grammar] | None:
        if self.rejects:
            raise UnsupportedConstraint("not with me")
        return None

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport:
        return ApplyReport(dict(self.failed), list(self.late), wait_seconds=1.0)

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        return [number for number in sequence_ids if number not in self.late]

    def free(self, request_id: str) -> None:
        self.freed.append(request_id)


def test_a_row_is_late_or_failed_if_it_is_so_in_one_member() -> None:
    own = Own()
    processors = PostProcessors(GuidedProcessor(InlinePool(LETTERS)), own)
    assert (
        processors.initialize("r", Constraint.choice(["ab"])).result(0).backend
        == "llguidance"
    )

    def apply() -> ApplyReport:
        processors.prepare((GuidedSequence("r", 1, []),))
        report = processors.apply(torch.zeros(1, LETTERS.padded_vocab_size))
        assert report.wait_seconds > 1.0
        return report

    own.late = [1]
    assert apply().late == [1]
    assert processors.decided([1]) == []
    own.late = []
    assert processors.decided([1]) == [1]
    assert apply().late == []
    own.failed, own.late = {1: BackendError("no")}, [1]
    report = apply()
    assert (list(report.failed), report.late) == ([1], [])


def test_a_request_that_one_member_rejects_is_freed() -> None:
    first, second = Own(), Own(rejects=True)
    with pytest.raises(UnsupportedConstraint):
        PostProcessors(first, second).initialize("r", Constraint.choice(["ab"]))
    assert first.freed == ["r"]


class Literal:
    """Written as in the RFC, and returns nothing from `apply`."""

    def initialize(self, logit_processor_config: object) -> None:
        self.rows = 0

    def prepare(self, seq_group_metadata_list: object) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> None:
        self.rows += len(logits)
        logits[:, 0] = -torch.inf


def test_a_class_of_the_rfc_may_change_the_logits_in_place() -> None:
    literal = Literal()
    processors = PostProcessors(RFC5423Adapter(literal, None))
    processors.prepare([GuidedSequence("r", 1, [])])
    logits = torch.zeros(1, 4)
    assert processors.apply(logits).failed == {}
    assert (literal.rows, logits[0].tolist()) == (1, [-torch.inf, 0, 0, 0])


class Copying(LogitPostProcessor):
    """Returns other logits, instead of changing those that it gets."""

    all_rows = True

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> Any:
        return logits + 1


def test_a_processor_that_returns_other_logits_is_told_so() -> None:
    processors = PostProcessors(Copying())
    processors.prepare([GuidedSequence("r", 1, [])])
    error = processors.apply(torch.zeros(1, 4)).failed[1]
    assert error.code == "post_processor_failed"
    assert "in place" in error.message
