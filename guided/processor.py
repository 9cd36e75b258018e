"""LogitPostProcessor, what an engine calls: `initialize` per request, `prepare` and `apply` per step, then `free`.

    processor.prepare(sequences)       # before the forward pass: new tokens go out, masks are computed elsewhere
    logits = model(...)                # meanwhile
    report = processor.apply(logits)   # wait for missing masks, write -inf over the forbidden logits

The interface is that of vLLM's RFC 5423. `GuidedProcessor` is the standard implementation; `ProcessorBundle`
(guided/bundle.py) composes several.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from guided.backends import candidates
from guided.bitmask import pack
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.kernel import apply_bitmask, load_loose_kernel
from guided.pool import Grammar, MaskPool, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_FIRST_MASK_SECONDS = 0.1
"""Minimum deadline for a step's first mask if no other row can be sampled. It delays new requests by up to this."""


@dataclass(slots=True)
class ApplyReport:
    """The result of `apply`: rows without a mask, and durations."""

    failed: dict[int, GuidedError] = field(default_factory=dict)
    """Errors by sequence id. The sequence has no valid mask and is over: its logits row allows a stop token only."""
    late: list[int] = field(default_factory=list)
    """Ids of sequences that wait for a mask, or for a worker. They must not be sampled in this step."""
    wait_seconds: float = 0.0
    """Seconds that `apply` waited for masks. Together with `prepare`, the exposed mask time."""
    mask_seconds: float = 0.0
    """Seconds that the workers have spent on masks since the last step, summed."""
    kernel_seconds: float = 0.0
    """Seconds for writing -inf, which is device work."""


@dataclass(frozen=True, slots=True)
class SampledEdit:
    """A change to a sequence after a token was sampled. The engine applies the fields in this order."""

    rollback: int = 0
    """Number of output tokens to remove, including the sampled one."""
    append: Sequence[int] = ()
    """Tokens to append without sampling. The engine may leave out any number of them at the end."""
    stop: bool = False
    """End the sequence (`finish_reason` stop)."""


class LogitPostProcessor(Protocol):
    """The methods of a post-processor that an engine calls, all from one thread."""

    max_rollback: int
    """Maximum of `SampledEdit.rollback`. Until a sequence has ended, the engine does not send its last
    `max_rollback - 1` output tokens to the client."""

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto", client: str = ""
    ) -> Future[Grammar]:
        """Start a request: compile its constraint. Its sequences can be prepared once the future is done.

        Args:
            backend: "auto", or the name of one backend.
            client: see `MaskPool.compile`.

        Returns:
            A future that ends with the compiled grammar, or with the error that fails the request.

        Raises:
            UnsupportedConstraint: the named backend does not have this kind of constraint.
            InvalidRequest: there is no backend of that name.
        """

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: NDArray[np.intp] | Sequence[int] | None = None,
        new_tokens: NDArray[np.int32] | None = None,
    ) -> None:
        """Start one step; return in microseconds. `apply` follows.

        Args:
            sequences: the constrained sequences of the batch, each at most once. While the batch does not change, pass
                the same tuple object again: this is the fastest.
            logits_rows: the logits row of each sequence, all different. None: row i for sequence i.
            new_tokens: int32 `[len(sequences)]`: see `MaskPool.submit`.

        Raises:
            ValueError: a sequence's request is not initialized (or is freed), its grammar is still being compiled, or
                its id is used twice, or by another request. Nothing was sent.
            GuidedError: the compilation of its grammar failed.
            RuntimeError: `apply` has not followed the last `prepare`.
        """

    def apply(
        self, logits: torch.Tensor, patience: float | None = None, alone: bool = True, keep_late: bool = False
    ) -> ApplyReport:
        """Mask the prepared rows, in place. A row without a valid mask is reported, and allows a stop token only.

        Args:
            logits: float `[rows, >= padded_vocab_size]` on any device; only prepared rows are written.
            patience: the step's mask deadline, in seconds after the logits are computed. A row that misses it is
                `late`. None: wait for every mask; a row is late only in the cases that `MaskPool.collect` lists.
            alone: no other row of the batch can be sampled now. The deadline for the first mask is then at least 0.1 s.
            keep_late: leave the logits of late rows as they are, for a caller that keeps them and prepares the sequence
                again when it has settled.

        Raises:
            RuntimeError: `prepare` was not called, or by another thread.
            ValueError: the logits are narrower than the vocabulary.
        """

    def sampled(self, sequences: Sequence[GuidedSequence]) -> dict[int, SampledEdit]:
        """Return how outputs are to change, by sequence id. Called after each step, between `apply` and `prepare`.

        Args:
            sequences: the object that was passed to `prepare`. The outputs include the sampled tokens. Edits are
                ignored for rows without a sampled token (late, failed, or of a draft) and for sequences that have
                ended.
        """

    def settled(self, timeout: float = 0.0) -> list[int]:
        """Return late sequences that are decided: prepare them again, with the tokens and logits that they had.

        Waits up to `timeout` seconds for the first one.
        """

    def failures(self) -> dict[str, GuidedError]:
        """Return requests that lost a matcher between steps because its worker ended, each reported once."""

    def rollback(self, sequence_id: int, length: int) -> None:
        """Declare that prepared tokens after the first `length` output tokens have changed (a rejected draft).

        An output that has merely become shorter is noticed without this. Unknown ids are ignored.
        """

    def free_sequence(self, sequence_id: int) -> None:
        """End one sequence of a request; the others continue. Idempotent."""

    def free(self, request_id: str) -> None:
        """End a request, for whatever reason: close its matchers and release its grammar. Idempotent."""


@dataclass(slots=True)
class _Request:
    future: Future[Grammar]
    sequences: set[int] = field(default_factory=set)


class GuidedProcessor:
    """The standard `LogitPostProcessor`: masks constrained rows with the bitmasks of a pool.

    Args:
        pool: computes the masks. The caller shuts it down.
    """

    max_rollback = 0

    def __init__(self, pool: MaskPool) -> None:
        self._pool = pool
        self._requests: dict[str, _Request] = {}
        self._request_ids: dict[int, str] = {}
        """Request id of each open sequence."""
        self._timed: set[int] = set()
        """Ids of open sequences with `mask_seconds`."""
        self._opened: tuple[GuidedSequence, ...] | None = None
        """The last prepared tuple, as long as all its sequences are open."""
        self._prepared: Sequence[GuidedSequence] | None = None
        """Sequences of the prepared step, until `apply` or `collect` finishes it."""
        self._logits_rows: NDArray[np.intp] | None = None
        self._forced: list[tuple[GuidedSequence, int, list[int]]] = []
        """`(sequence, length of its output, forced tokens)` of this step, from `StepMasks.forced`."""
        self._thread = 0
        """The thread that called `prepare`."""
        self._stop_mask = pack(pool.vocabulary.stop_token_ids[:1], pool.vocabulary.padded_vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the masks."""
        return self._pool.vocabulary

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto", client: str = ""
    ) -> Future[Grammar]:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already initialized")
        load_loose_kernel()
        future = self._pool.compile(constraint, candidates(constraint.kind, backend), client)
        self._requests[request_id] = _Request(future)
        return future

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: NDArray[np.intp] | Sequence[int] | None = None,
        new_tokens: NDArray[np.int32] | None = None,
    ) -> None:
        if self._prepared is not None:
            raise RuntimeError("prepare() was called twice without apply() between")
        if sequences is not self._opened:
            known = self._request_ids
            unknown = [each for each in sequences if known.get(each.sequence_id) != each.request_id]
            if len({each.sequence_id for each in sequences}) < len(sequences):
                raise ValueError("a sequence id occurs twice in this step: each sequence needs its own")
            if unknown:
                self._open(unknown)
            self._opened = sequences if isinstance(sequences, tuple) else None
        self._logits_rows = None if logits_rows is None else np.asarray(logits_rows, np.intp)
        self._pool.submit(sequences, new_tokens)
        self._prepared = sequences
        self._thread = threading.get_ident()

    def _open(self, sequences: Iterable[GuidedSequence]) -> None:
        opening: list[tuple[GuidedSequence, _Request]] = []
        for sequence in sequences:
            if sequence.sequence_id in self._request_ids:
                owner = self._request_ids[sequence.sequence_id]
                raise ValueError(f"sequence id {sequence.sequence_id} belongs to request {owner!r}: free that first")
            request = self._requests.get(sequence.request_id)
            if request is None:
                raise ValueError(f"request {sequence.request_id!r} is not initialized")
            if not request.future.done():
                raise ValueError(f"the grammar of request {sequence.request_id!r} is still being compiled")
            opening.append((sequence, request))
        for sequence, request in opening:
            self._pool.open(sequence, request.future.result(timeout=0))
            request.sequences.add(sequence.sequence_id)
            self._request_ids[sequence.sequence_id] = sequence.request_id
            if sequence.mask_seconds is not None:
                self._timed.add(sequence.sequence_id)

    def apply(
        self, logits: torch.Tensor, patience: float | None = None, alone: bool = True, keep_late: bool = False
    ) -> ApplyReport:
        width = self.vocabulary.padded_vocab_size
        if self._prepared and logits.shape[-1] < width:
            raise ValueError(f"the logits have {logits.shape[-1]} columns and the vocabulary {width}: pass whole rows")
        sequences = self._take_prepared("apply")
        if patience is not None and logits.is_cuda and sequences:
            import torch

            torch.cuda.current_stream(logits.device).synchronize()  # the deadline counts from here
        step, report = self._collect(sequences, patience, alone)
        started = time.perf_counter()
        rows = [part.rows for part in step.ready]
        if self._logits_rows is not None:
            rows = [self._logits_rows[part] for part in rows]
        apply_bitmask(logits, step.ready, np.concatenate(rows) if rows else ())
        closed = self._without_mask(step, keep_late)
        if closed:
            logits[closed] = float("-inf")
            logits[closed, self.vocabulary.stop_token_ids[0]] = 0.0
        report.kernel_seconds = time.perf_counter() - started
        return report

    def collect(self, bitmask: NDArray[np.int32], patience: float | None = None, alone: bool = True) -> ApplyReport:
        """Copy the masks, instead of `apply`: for an engine that writes -inf itself.

        Args:
            bitmask: int32 `[rows, words]`. Line i gets the mask of the sequence with logits row i. Lines of failed and
                late sequences allow a stop token only.
            patience, alone: as for `apply`.
        """
        step, report = self._collect(self._take_prepared("collect"), patience, alone)
        step.copy_to(bitmask, self._logits_rows)
        bitmask[self._without_mask(step, False)] = self._stop_mask
        return report

    def _take_prepared(self, method: str) -> Sequence[GuidedSequence]:
        """Return the prepared step, which `method` finishes."""
        if self._prepared is None:
            raise RuntimeError(f"{method}() without prepare()")
        if self._thread != threading.get_ident():
            raise RuntimeError(f"{method}() was called by another thread than prepare(): use one processor per thread")
        sequences, self._prepared = self._prepared, None
        return sequences

    def _without_mask(self, step: StepMasks, keep_late: bool) -> list[int]:
        """Return the logits rows of a step that have no mask."""
        rows = [*step.failed, *(() if keep_late else step.late)]
        return rows if self._logits_rows is None else [int(self._logits_rows[row]) for row in rows]

    def _collect(
        self, sequences: Sequence[GuidedSequence], patience: float | None, alone: bool
    ) -> tuple[StepMasks, ApplyReport]:
        """Collect the step, and free the sequences that failed."""
        started = time.perf_counter()
        timeout = max(patience, _FIRST_MASK_SECONDS) if patience is not None and alone else patience
        step = self._pool.collect(timeout, patience)
        report = ApplyReport(wait_seconds=time.perf_counter() - started, mask_seconds=step.seconds)
        self._forced = [(sequences[row], len(sequences[row].output_token_ids), run) for row, run in step.forced.items()]
        report.late = [sequences[row].sequence_id for row in step.late]
        if self._timed:
            for part in step.ready:
                for slot, row in zip(part.slots, part.rows, strict=True):
                    if (sequence := sequences[row]).mask_seconds is not None:
                        sequence.mask_seconds += float(part.seconds[slot])
        if step.failed:
            report.failed = {sequences[row].sequence_id: error for row, error in step.failed.items()}
            self._close(list(report.failed))
        return step, report

    def sampled(self, sequences: Sequence[GuidedSequence]) -> dict[int, SampledEdit]:
        """Append the tokens that have no alternative, if the pool looks ahead."""
        edits: dict[int, SampledEdit] = {}
        for sequence, length, (first, *others) in self._forced:
            output = sequence.output_token_ids
            if others and len(output) == length + 1 and output[-1] == first:
                edits[sequence.sequence_id] = SampledEdit(append=others)
        return edits

    def settled(self, timeout: float = 0.0) -> list[int]:
        return self._pool.settled(timeout)

    def failures(self) -> dict[str, GuidedError]:
        lost = self._pool.failures()
        return {self._request_ids[each]: error for each, error in lost.items() if each in self._request_ids}

    def free(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._close(list(request.sequences))
        request.future.add_done_callback(self._release)

    def _release(self, compiled: Future[Grammar]) -> None:
        if compiled.exception() is None:
            self._pool.release(compiled.result())

    def rollback(self, sequence_id: int, length: int) -> None:
        self._pool.rollback(sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        self._close([sequence_id])

    def _close(self, sequence_ids: Collection[int]) -> None:
        self._pool.free(sequence_ids)
        self._timed.difference_update(sequence_ids)
        self._opened = None  # a freed sequence that is prepared again is opened again
        for sequence_id in sequence_ids:
            request = self._requests.get(self._request_ids.pop(sequence_id, ""))
            if request is not None:
                request.sequences.discard(sequence_id)
