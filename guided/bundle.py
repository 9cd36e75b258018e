"""ProcessorBundle: several post-processors behind the interface of one, none of which can stop the engine.

RFC 5423: an engine has one `LogitPostProcessor`; "it's easy to write a LogitPostProcessor that bundles an arbitrary
number", and "if any logit processor is failed, we will mark the relevant seq_group as failed".
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from guided.constraint import Constraint
from guided.errors import GuidedError, PostProcessorFailed, bounded
from guided.pool import Grammar
from guided.post_processor import ApplyReport, LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence, SequenceOutput

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Member:
    """A post-processor of a bundle, and its rows of the step. Calls it with the parameters that its methods have."""

    def __init__(self, processor: LogitPostProcessor, config: object) -> None:
        self.processor = processor
        self.sequences: Sequence[GuidedSequence] = ()
        self.error: GuidedError | None = None
        """It has raised in `prepare` or `apply` of this step."""
        self._places: NDArray[np.intp] | None = None
        """Places of its rows among those of the bundle. None: all."""
        self._once = _parameters(processor.initialize) == 1
        self._takes_rows = _parameters(processor.prepare) > 1
        self._takes_deadline = _parameters(processor.apply) > 1
        if self._once:
            initialize: Any = processor.initialize
            initialize(config)

    def initialize(self, *request: Any) -> Future[Grammar]:
        future = None if self._once else self.processor.initialize(*request)
        if future is None:
            future = Future()
            future.set_result(Grammar("", "", request[1], ()))
        return future

    def select(self, sequences: Sequence[GuidedSequence]) -> None:
        """Select the member's rows of a new batch."""
        places = [place for place, one in enumerate(sequences) if self.handles(one)]
        everything = len(places) == len(sequences)
        self._places = None if everything else np.array(places, np.intp)
        self.sequences = sequences if everything else tuple(sequences[place] for place in places)

    def handles(self, sequence: GuidedSequence) -> bool:
        return self.processor.all_rows or sequence.constrained

    def prepare(self, logits_rows: Any, new_tokens: NDArray[np.int32] | None) -> None:
        if not self._takes_rows:
            self.processor.prepare(self.sequences)
        elif self._places is None:
            self.processor.prepare(self.sequences, logits_rows, new_tokens)
        else:
            rows = self._places if logits_rows is None else np.asarray(logits_rows, np.intp)[self._places]
            tokens = None if new_tokens is None else new_tokens[self._places]
            self.processor.prepare(self.sequences, rows, tokens)

    def apply(self, logits: torch.Tensor, *deadline: Any) -> ApplyReport:
        found: Any = self.processor.apply(logits, *deadline if self._takes_deadline else ())
        if found is None or isinstance(found, ApplyReport):
            return found or ApplyReport()
        if found is not logits:
            logits.copy_(found)
        return ApplyReport()

    def edits(self, samples: Sequence[SequenceOutput | None]) -> dict[int, SampledEdit]:
        if samples and self._places is not None:
            samples = [samples[place] for place in self._places.tolist()]
        return self.processor.edits(self.sequences, samples)


class ProcessorBundle(LogitPostProcessor):
    """Calls its members in order. A row is sampled only if every member is done with it.

    An exception of a member ends the requests of which it has a row in this step (`ApplyReport.failed`, or `failures`
    if it was raised after `apply`). All others go on, and the member is called again in the next step.

    A member may get the logits of a late row a second time, as it left them. So its changes must be idempotent, as
    masking is.

    Args:
        first: `initialize` returns the grammar of this member.
        others: applied after `first`, each to the logits as its predecessor left them.
        config: the argument of `initialize` of a member whose `initialize` has one parameter, as in the RFC.
    """

    def __init__(self, first: LogitPostProcessor, *others: LogitPostProcessor, config: object = None) -> None:
        self._members = [_Member(each, config) for each in (first, *others)]
        self.max_rollback = max(each.processor.max_rollback for each in self._members)
        self.all_rows = any(each.processor.all_rows for each in self._members)
        self._batch: Sequence[GuidedSequence] | None = None
        self._open: dict[int, GuidedSequence] = {}
        """By id: sequences that were prepared and not freed."""
        self._lost: dict[str, GuidedError] = {}
        """Errors of requests for `failures`."""

    @property
    def needs_samples(self) -> bool:
        return any(each.processor.needs_samples for each in self._members)

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto", client: str = ""
    ) -> Future[Grammar]:
        """Initialize the request in every member. The future is done when the futures of all members are."""
        futures: list[Future[Grammar]] = []
        joined: Future[Grammar] = Future()
        try:
            for member in self._members:
                futures.append(member.initialize(request_id, constraint, backend, client))
        except Exception as error:
            for initialized in self._members[: len(futures)]:
                self._call(initialized, initialized.processor.free, (), request_id)
            if isinstance(error, GuidedError):
                raise
            joined.set_exception(_failure(member, "initialize", error))
            return joined

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
        if sequences is not self._batch:
            self._open.update((sequence.sequence_id, sequence) for sequence in sequences)
            for member in self._members:
                member.select(sequences)
            self._batch = sequences if isinstance(sequences, tuple) else None
        for member in self._members:
            member.error = None
            if member.sequences:
                try:
                    member.prepare(logits_rows, new_tokens)
                except Exception as error:
                    member.error = _failure(member, "prepare", error)

    def apply(
        self, logits: torch.Tensor, patience: float | None = None, alone: bool = True, keep_late: bool = False
    ) -> ApplyReport:
        """Apply every member. A sequence that is late or failed in one member is late or failed in the report."""
        merged = ApplyReport()
        late: set[int] = set()
        for member in self._members:
            if not member.sequences:
                continue
            if member.error is None:
                try:
                    report = member.apply(logits, patience, alone, keep_late)
                except Exception as error:
                    member.error = _failure(member, "apply", error)
            if member.error is not None:
                report = ApplyReport({sequence.sequence_id: member.error for sequence in member.sequences})
            merged.failed.update(report.failed)
            late.update(report.late)
            merged.wait_seconds += report.wait_seconds
            merged.mask_seconds += report.mask_seconds
            merged.kernel_seconds += report.kernel_seconds
        merged.late = sorted(late.difference(merged.failed))
        return merged

    def edits(
        self, sequences: Sequence[GuidedSequence], samples: Sequence[SequenceOutput | None] = ()
    ) -> dict[int, SampledEdit]:
        """Ask every member. The last one that wants to change a sequence decides."""
        edits: dict[int, SampledEdit] = {}
        for member in self._members:
            if member.sequences and member.error is None:
                edits.update(self._call(member, member.edits, member.sequences, samples) or {})
        return edits

    def settled(self, timeout: float = 0.0) -> list[int]:
        """Return sequences that settled in a member. `apply` reports one late again if another member is still late."""
        settled: set[int] = set()
        for member in self._members:
            wait = 0.0 if settled else timeout
            settled.update(self._call(member, member.processor.settled, self._open.values(), wait) or ())
        return sorted(settled)

    def failures(self) -> dict[str, GuidedError]:
        for member in self._members:
            self._lost.update(self._call(member, member.processor.failures, self._open.values()) or {})
        lost, self._lost = self._lost, {}
        return lost

    def rollback(self, sequence_id: int, length: int) -> None:
        for member in self._members:
            self._call(member, member.processor.rollback, self._one(sequence_id), sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        for member in self._members:
            self._call(member, member.processor.free_sequence, self._one(sequence_id), sequence_id)
        self._open.pop(sequence_id, None)
        self._batch = None  # a freed sequence that is prepared again is open again

    def free(self, request_id: str) -> None:
        for member in self._members:
            self._call(member, member.processor.free, (), request_id)  # an error is for the log: the request is over
        for sequence in [one for one in self._open.values() if one.request_id == request_id]:
            del self._open[sequence.sequence_id]
        self._lost.pop(request_id, None)

    def _one(self, sequence_id: int) -> list[GuidedSequence]:
        return [self._open[sequence_id]] if sequence_id in self._open else []

    def _call(
        self, member: _Member, method: Callable[..., _T], sequences: Collection[GuidedSequence], *arguments: Any
    ) -> _T | None:
        """Call a method of a member. If it raises, `failures` reports the requests of those sequences that it handles.
        Returns None then."""
        try:
            return method(*arguments)
        except Exception as error:
            failure = _failure(member, method.__name__, error)
            self._lost.update((sequence.request_id, failure) for sequence in sequences if member.handles(sequence))
            return None


def _failure(member: _Member, method: str, error: Exception) -> GuidedError:
    """Return the error of the requests that an exception ends."""
    if isinstance(error, GuidedError):
        return error
    name = type(member.processor).__name__
    logger.error("the post-processor %s raised in %s: its requests end", name, method, exc_info=error)
    return PostProcessorFailed(f"the post-processor {name} failed in {method}: {bounded(repr(error))}")


def _parameters(method: Callable[..., object]) -> int:
    """Return how many positional arguments a method takes."""
    kinds = [each.kind for each in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 9
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
