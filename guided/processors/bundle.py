"""ProcessorBundle: several post-processors behind the interface of one, none of which can stop the engine.

RFC 5423: an engine has one `LogitPostProcessor`; "it's easy to write a LogitPostProcessor that bundles an arbitrary
number", and "if any logit processor is failed, we will mark the relevant seq_group as failed".
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, PostProcessorFailed, bounded
from guided.pools.protocol import Grammar
from guided.processors.interface import ApplyReport, LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence, SequenceOutput

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class _Member:
    """A post-processor of a bundle, and its rows of the step. Calls it with the parameters that its methods have.

    Raises:
        ValueError: a method has another signature, or `initialize(config)` failed.
    """

    def __init__(self, processor: LogitPostProcessor, config: object) -> None:
        self.processor = processor
        self.name = type(processor).__name__
        self.sequences: Sequence[GuidedSequence] = ()
        self.error: GuidedError | None = None
        """It has raised in `prepare` or `apply` of this step."""
        self._places: NDArray[np.intp] = np.empty(0, np.intp)
        """Places of its rows among those of the bundle."""
        self.has_config = self._form("initialize", 3, 1) == 1
        self._takes_rows = self._form("prepare", 2, 1) == 2
        self._takes_deadline = self._form("apply", 2, 1) == 2
        self._form("sampled", 3)
        if self.has_config:
            initialize: Any = processor.initialize
            try:
                initialize(config)
            except Exception as error:
                raise ValueError(f"the post-processor {self.name} failed in initialize: {bounded(error)}") from error

    def _form(self, name: str, *counts: int) -> int:
        """Return the first of `counts` that is a number of arguments that a method takes."""
        method = getattr(self.processor, name)
        for count in counts:
            with contextlib.suppress(TypeError):
                inspect.signature(method).bind(*range(count))
                if not inspect.iscoroutinefunction(method):
                    return count
        wanted = inspect.signature(getattr(LogitPostProcessor, name))
        raise ValueError(f"the post-processor {self.name} needs the method {name}{wanted}, or with the RFC's parameter")

    def select(self, sequences: Sequence[GuidedSequence]) -> None:
        """Select the member's rows of a new batch."""
        places = [place for place, one in enumerate(sequences) if self.handles(one)]
        self._places = np.array(places, np.intp)
        self.sequences = tuple(sequences[place] for place in places)

    def handles(self, sequence: GuidedSequence) -> bool:
        return self.processor.all_rows or sequence.constrained

    def prepare(self, logits_rows: Any) -> None:
        if logits_rows is None:
            rows = self._places
        else:
            rows = np.asarray(logits_rows, np.intp)[self._places]
        self.processor.prepare(self.sequences, *(rows,) if self._takes_rows else ())

    def apply(self, logits: torch.Tensor, deadline: float | None) -> ApplyReport:
        found: Any = self.processor.apply(logits, *(deadline,) if self._takes_deadline else ())
        if isinstance(found, ApplyReport):
            found.failed = {name: self.failure("apply", error) for name, error in found.failed.items()}
            return found
        if found is not None and found is not logits:
            logits.copy_(found)
        return ApplyReport()

    def sampled(self, place: int, samples: Sequence[SequenceOutput | None]) -> SampledEdit | None:
        """Return the edit that `sampled` wants for one of the member's rows; None if there is none."""
        sample = samples[self._places[place]]
        if sample is None:
            return None
        token = sample.output_token
        backtrack, append, stop = self.processor.sampled(self.sequences[place], token, sample.logprobs)
        if backtrack == 0 and list(append[:1]) == [token]:
            if len(append) > 1 or stop:
                return SampledEdit(0, append[1:], stop)
            return None
        return SampledEdit(backtrack + 1, append, stop)

    def failure(self, method: str, error: object) -> GuidedError:
        """Return the error of the requests that an exception, or a reported error, ends."""
        if isinstance(error, GuidedError):
            return error
        if isinstance(error, Exception):
            exception = error
        else:
            exception = None
        logger.error("the post-processor %s raised in %s: its requests end", self.name, method, exc_info=exception)
        return PostProcessorFailed(f"the post-processor {self.name} failed in {method}: {bounded(repr(error))}")


class ProcessorBundle(LogitPostProcessor):
    """Calls its members in order. A row is sampled only if every member is done with it.

    An exception of a member ends the requests of which it has a row in this step (`ApplyReport.failed`, or `failures`
    if it was raised after `apply`). All others go on, and the member is called again in the next step.

    A sequence that is late in one member is prepared again in every member. `edits` and `sampled` get each token once.

    Args:
        processors: applied in order, each to the logits as its predecessor left them. `initialize` returns the first
            future that one of them returns.
        config: the argument for members with the RFC's `initialize(config)`.
    """

    def __init__(self, *processors: LogitPostProcessor, config: object = None) -> None:
        self._members = [_Member(each, config) for each in processors]
        self.max_rollback = max((each.processor.max_rollback for each in self._members), default=0)
        self.all_rows = any(each.processor.all_rows for each in self._members)
        self._batch: Sequence[GuidedSequence] | None = None
        self._open: dict[int, GuidedSequence] = {}
        """By id: sequences that were prepared and not freed."""
        self._lost: dict[str, GuidedError] = {}
        """Errors of requests for `failures`."""

    @property
    def needs_samples(self) -> bool:
        return any(each.processor.needs_samples for each in self._members)

    def initialize(self, request_id: str, constraint: Constraint, backend: str = "auto") -> Future[Grammar]:
        """Initialize the request in every member."""
        compiled: Future[Grammar] | None = None
        for number, member in enumerate(self._members):
            try:
                if member.has_config:
                    future = None
                else:
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
        self, sequences: Sequence[GuidedSequence], logits_rows: NDArray[np.intp] | Sequence[int] | None = None
    ) -> None:
        if sequences is not self._batch:
            self._open.update((sequence.sequence_id, sequence) for sequence in sequences)
            for member in self._members:
                member.select(sequences)
            if isinstance(sequences, tuple):
                self._batch = sequences
            else:
                self._batch = None
        for member in self._members:
            member.error = None
            if member.sequences:
                try:
                    member.prepare(logits_rows)
                except Exception as error:
                    member.error = member.failure("prepare", error)

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport:
        """Apply every member. A sequence that is late or failed in one member is late or failed in the report."""
        merged = ApplyReport()
        for member in self._members:
            if not member.sequences:
                continue
            if member.error is None:
                try:
                    report = member.apply(logits, deadline)
                except Exception as error:
                    member.error = member.failure("apply", error)
            if member.error is not None:
                report = ApplyReport({sequence.sequence_id: member.error for sequence in member.sequences})
            merged.add(report)
        return merged

    def edits(
        self, sequences: Sequence[GuidedSequence], samples: Sequence[SequenceOutput | None] = ()
    ) -> dict[int, SampledEdit]:
        """Ask every member. The last one that wants to change a sequence decides.

        Args:
            samples: the sampled token of each sequence, or None. Empty unless `needs_samples`.
        """
        edits: dict[int, SampledEdit] = {}
        for member in self._members:
            if not member.sequences or member.error is not None:
                continue
            with self._containing(member, "edits", member.sequences):
                edits.update(member.processor.edits(member.sequences))
            for place, sequence in enumerate(member.sequences if member.processor.needs_samples else ()):
                with self._containing(member, "sampled", [sequence]):
                    edit = member.sampled(place, samples)
                    if edit is not None:
                        edits[sequence.sequence_id] = edit
        return edits

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        """Return those of these late sequences that every member has decided."""
        decided = list(sequence_ids)
        for member in self._members:
            with self._containing(member, "decided", self._open.values()):
                decided = member.processor.decided(decided)
        return decided

    def failures(self) -> dict[str, GuidedError]:
        """Return requests that failed between two steps, each once. Others fail in the report of their next step."""
        lost = self._lost
        self._lost = {}
        return lost

    def rollback(self, sequence_id: int, length: int) -> None:
        for member in self._members:
            with self._containing(member, "rollback", self._one(sequence_id)):
                member.processor.rollback(sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        for member in self._members:
            with self._containing(member, "free_sequence", self._one(sequence_id)):
                member.processor.free_sequence(sequence_id)
        self._open.pop(sequence_id, None)
        self._batch = None  # a freed sequence that is prepared again is open again

    def free(self, request_id: str) -> None:
        for member in self._members:
            with self._containing(member, "free"):
                member.processor.free(request_id)
        for sequence in [one for one in self._open.values() if one.request_id == request_id]:
            del self._open[sequence.sequence_id]
        self._lost.pop(request_id, None)

    def _one(self, sequence_id: int) -> list[GuidedSequence]:
        if sequence_id in self._open:
            return [self._open[sequence_id]]
        return []

    @contextlib.contextmanager
    def _containing(
        self, member: _Member, method: str, sequences: Iterable[GuidedSequence] = ()
    ) -> Generator[None, None, None]:
        """Call a method of a member. If it raises, `failures` reports the requests of those `sequences` that the member
        handles."""
        try:
            yield
        except Exception as error:
            failure = member.failure(method, error)
            self._lost.update((sequence.request_id, failure) for sequence in sequences if member.handles(sequence))
