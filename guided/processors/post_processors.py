"""PostProcessors: several post-processors behind the interface of one, none of which
can stop the engine.

RFC 5423: an engine has one `LogitPostProcessor`; "it's easy to write a
LogitPostProcessor that bundles an arbitrary number", and "if any logit processor is
failed, we will mark the relevant seq_group as failed".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, PostProcessorFailed, bounded
from guided.pools.protocol import Grammar
from guided.processors.logit_post_processor import (
    ApplyReport,
    LogitPostProcessor,
    SampledEdit,
)
from guided.sequence import GuidedSequence, SequenceOutput

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from guided.processors.logit_post_processor import LogitsRows

logger = logging.getLogger(__name__)


class _Member:
    """One of an engine's post-processors, and its rows of the batch."""

    def __init__(self, processor: LogitPostProcessor) -> None:
        self.processor = processor
        self.sequences: Sequence[GuidedSequence] = ()
        self.logits_rows: NDArray[np.intp] = np.empty(0, np.intp)
        self.error: GuidedError | None = None
        """The error that the processor has raised in `prepare` or `apply` of this
        step."""
        self._places: list[int] = []
        """The positions of the member's rows in the batch."""

    def select(
        self, sequences: Sequence[GuidedSequence], logits_rows: NDArray[np.intp]
    ) -> None:
        """Select the member's rows of a new batch."""
        every = self.processor.all_rows
        self._places = [
            place
            for place, sequence in enumerate(sequences)
            if every or sequence.constrained
        ]
        self.sequences = [sequences[place] for place in self._places]
        self.logits_rows = logits_rows[self._places]

    def samples(
        self, samples: Sequence[SequenceOutput | None]
    ) -> Sequence[SequenceOutput | None]:
        """Return the samples of the member's rows, if it needs them."""
        if self.processor.needs_samples:
            return [samples[place] for place in self._places]
        return ()

    def apply(self, logits: torch.Tensor, deadline: float | None) -> ApplyReport:
        """Apply the processor. If it raises, now or in `prepare`, its rows have
        failed."""
        if self.error is None:
            try:
                report: object = self.processor.apply(logits, deadline)
                if report is None or report is logits:
                    report = ApplyReport()
                if not isinstance(report, ApplyReport):
                    raise TypeError(
                        f"apply changes the logits in place, and returns a report, not {type(report)}"
                    )
                report.failed = {
                    name: self.failure("apply", error)
                    for name, error in report.failed.items()
                }
                return report
            except Exception as error:
                self.error = self.failure("apply", error)
        return ApplyReport(
            {sequence.sequence_id: self.error for sequence in self.sequences}
        )

    def find(self, sequence_id: int) -> Iterator[GuidedSequence]:
        """Yield the sequence with this id, if it is in the batch."""
        return (
            sequence
            for sequence in self.sequences
            if sequence.sequence_id == sequence_id
        )

    def failure(self, method: str, error: object) -> GuidedError:
        """Return the error of the requests that an exception, or a reported error,
        ends."""
        if isinstance(error, GuidedError):
            return error
        name = self.processor.name
        logger.error(
            "the post-processor %s failed in %s: its requests end",
            name,
            method,
            exc_info=True,
        )
        return PostProcessorFailed(
            f"the post-processor {name} failed in {method}: {bounded(repr(error))}"
        )


class PostProcessors(LogitPostProcessor):
    """Calls its members in order. A row is sampled only if every member is done with
    it.

    If a member raises an exception, the requests with rows of the member in this step
    end (`ApplyReport.failed`, or `failures` after `apply`). All other requests go on,
    and the member is called again in the next step.

    A sequence that is late in one member is prepared again in every member. `edits`
    gets each token once.

    Args:
        processors: applied in order, each to the logits as its predecessor left them.
            `initialize` returns the first future that one of them returns.
    """

    def __init__(self, *processors: LogitPostProcessor) -> None:
        self._members = [_Member(processor) for processor in processors]
        self.max_rollback = max(
            (processor.max_rollback for processor in processors), default=0
        )
        self.all_rows = any(processor.all_rows for processor in processors)
        self.needs_samples = any(processor.needs_samples for processor in processors)
        self._batch: int | None = None
        """The number of the last batch."""
        self._lost: dict[str, GuidedError] = {}
        """The errors that `failures` returns next, by request id."""

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto"
    ) -> Future[Grammar]:
        """Initialize the request in every member."""
        compiled: Future[Grammar] | None = None
        for number, member in enumerate(self._members):
            try:
                future = member.processor.initialize(request_id, constraint, backend)
            except Exception as error:
                for begun in self._members[: number + 1]:
                    with self._containing(begun, "free"):
                        begun.processor.free(request_id)
                if isinstance(error, GuidedError):
                    raise
                failed: Future[Grammar] = Future()
                failed.set_exception(member.failure("initialize", error))
                return failed
            compiled = compiled or future
        if compiled is None:
            raise InternalError("no post-processor of this engine enforces constraints")
        return compiled

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: LogitsRows = None,
        batch: int | None = None,
    ) -> None:
        if batch is None or batch != self._batch:
            if logits_rows is None:
                logits_rows = range(len(sequences))
            for member in self._members:
                member.select(sequences, np.asarray(logits_rows, np.intp))
            self._batch = batch
        for member in self._members:
            member.error = None
            if member.sequences:
                try:
                    member.processor.prepare(
                        member.sequences, member.logits_rows, batch
                    )
                except Exception as error:
                    member.error = member.failure("prepare", error)

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport:
        """Apply every member. A sequence that is late or failed in one member is late
        or failed in the report."""
        merged = ApplyReport()
        for member in self._members:
            if member.sequences:
                merged.add(member.apply(logits, deadline))
        return merged

    def edits(
        self,
        sequences: Sequence[GuidedSequence],
        samples: Sequence[SequenceOutput | None] = (),
    ) -> dict[int, SampledEdit]:
        """Ask every member. The last one that wants to change a sequence decides."""
        edits: dict[int, SampledEdit] = {}
        for member in self._members:
            if not member.sequences or member.error is not None:
                continue
            with self._containing(member, "edits", member.sequences):
                wanted = member.processor.edits(
                    member.sequences, member.samples(samples)
                )
                for sequence_id, edit in wanted.items():
                    with self._containing(member, "edits", member.find(sequence_id)):
                        if isinstance(edit, Exception):
                            raise edit
                        edits[sequence_id] = edit
        return edits

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        """Return those of these late sequences that every member has decided."""
        decided = list(sequence_ids)
        for member in self._members:
            with self._containing(member, "decided", member.sequences):
                decided = member.processor.decided(decided)
        return decided

    def failures(self) -> dict[str, GuidedError]:
        """Return requests that failed between two steps, each once. Others fail in the
        report of their next step."""
        lost = self._lost
        self._lost = {}
        return lost

    def rollback(self, sequence_id: int, length: int) -> None:
        for member in self._members:
            with self._containing(member, "rollback", member.find(sequence_id)):
                member.processor.rollback(sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        for member in self._members:
            with self._containing(member, "free_sequence", member.find(sequence_id)):
                member.processor.free_sequence(sequence_id)

    def free(self, request_id: str) -> None:
        for member in self._members:
            with self._containing(member, "free"):
                member.processor.free(request_id)
        self._lost.pop(request_id, None)

    @contextlib.contextmanager
    def _containing(
        self, member: _Member, method: str, sequences: Iterable[GuidedSequence] = ()
    ) -> Generator[None, None, None]:
        """Call a method of a member. If it raises, `failures` reports the requests of
        `sequences`."""
        try:
            yield
        except Exception as error:
            failure = member.failure(method, error)
            self._lost.update((sequence.request_id, failure) for sequence in sequences)
