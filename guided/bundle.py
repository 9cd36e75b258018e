"""ProcessorBundle: several post-processors behind the interface of one (vLLM RFC 5423).

An engine takes one `LogitPostProcessor`. A bundle hands every call to its members, in order: for example the standard
`GuidedProcessor` for constraints, and an application's own processor after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pool import Grammar
from guided.processor import ApplyReport, LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class ProcessorBundle:
    """Calls its members in order. A row is sampled only if every member is done with it.

    A member may get the logits of a late row a second time, as it left them. So its changes must be idempotent, as
    masking is.

    Args:
        first: `initialize` returns the grammar of this member.
        others: applied after `first`, each to the logits as its predecessor left them.
    """

    def __init__(self, first: LogitPostProcessor, *others: LogitPostProcessor) -> None:
        self._members = (first, *others)
        self.max_rollback = max(member.max_rollback for member in self._members)

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto", client: str = ""
    ) -> Future[Grammar]:
        """Initialize the request in every member. The future is done when the futures of all members are."""
        futures: list[Future[Grammar]] = []
        try:
            for member in self._members:
                futures.append(member.initialize(request_id, constraint, backend, client))
        except BaseException:
            for member in self._members[: len(futures)]:
                member.free(request_id)
            raise
        joined: Future[Grammar] = Future()

        def finish(_: Future[Grammar]) -> None:
            if joined.done() or not all(future.done() for future in futures):
                return
            error = next((error for future in futures if (error := future.exception()) is not None), None)
            if joined.set_running_or_notify_cancel():
                if error is None:
                    joined.set_result(futures[0].result())
                else:
                    joined.set_exception(error)

        for future in futures:
            future.add_done_callback(finish)
        return joined

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: NDArray[np.intp] | Sequence[int] | None = None,
        new_tokens: NDArray[np.int32] | None = None,
    ) -> None:
        for member in self._members:
            member.prepare(sequences, logits_rows, new_tokens)

    def apply(
        self, logits: torch.Tensor, patience: float | None = None, alone: bool = True, keep_late: bool = False
    ) -> ApplyReport:
        """Apply every member. A sequence that is late or failed in one member is late or failed in the report."""
        merged = ApplyReport()
        late: set[int] = set()
        for member in self._members:
            report = member.apply(logits, patience, alone, keep_late)
            merged.failed.update(report.failed)
            late.update(report.late)
            merged.wait_seconds += report.wait_seconds
            merged.mask_seconds += report.mask_seconds
            merged.kernel_seconds += report.kernel_seconds
        merged.late = sorted(late.difference(merged.failed))
        return merged

    def sampled(self, sequences: Sequence[GuidedSequence]) -> dict[int, SampledEdit]:
        """Ask every member. The last one that wants to change a sequence decides."""
        edits: dict[int, SampledEdit] = {}
        for member in self._members:
            edits.update(member.sampled(sequences))
        return edits

    def settled(self, timeout: float = 0.0) -> list[int]:
        """Return sequences that settled in a member. `apply` reports one late again if another member is still late."""
        settled: set[int] = set()
        for member in self._members:
            settled.update(member.settled(0.0 if settled else timeout))
        return sorted(settled)

    def failures(self) -> dict[str, GuidedError]:
        lost: dict[str, GuidedError] = {}
        for member in self._members:
            lost.update(member.failures())
        return lost

    def rollback(self, sequence_id: int, length: int) -> None:
        for member in self._members:
            member.rollback(sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        for member in self._members:
            member.free_sequence(sequence_id)

    def free(self, request_id: str) -> None:
        for member in self._members:
            member.free(request_id)
