"""GuidedProcessor: the standard post-processor. It masks constrained rows with the
bitmasks of a pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from guided.backends import candidates
from guided.bitmask import pack
from guided.constraint import Constraint
from guided.pools.protocol import Grammar, MaskPool, StepMasks
from guided.processors.kernel import BitmaskKernel
from guided.processors.late_masks import (
    FIRST_MASK_SECONDS,
    collect_during,
    wait_for_first,
    wait_for_share,
)
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


class GuidedProcessor(LogitPostProcessor):
    """The standard `LogitPostProcessor`. It computes masks with `pool`, which the
    caller shuts down."""

    all_rows = False

    def __init__(self, pool: MaskPool) -> None:
        self._pool = pool
        self._kernel = BitmaskKernel()
        self.vocabulary = pool.vocabulary
        """The vocabulary of the masks."""
        self._grammars: dict[str, Future[Grammar]] = {}
        """The grammars of requests, by request id."""
        self._sequences: dict[int, GuidedSequence] = {}
        """The open sequences, by id. A pool may have others: it may have several
        users."""
        self._batch: int | None = None
        """The number of the last batch."""
        self._is_timed = False
        """Whether a sequence of the batch has `mask_seconds`."""
        self._prepared: Sequence[GuidedSequence] | None = None
        """The sequences of the prepared step, until `apply` or `collect` finishes
        it."""
        self._logits_rows: NDArray[np.intp] = np.empty(0, np.intp)
        """The logits row of each sequence of the batch."""
        self._forced: list[tuple[GuidedSequence, int, list[int]]] = []
        """The forced tokens of this step: `(sequence, length of its output,
        StepMasks.forced)`."""
        self._stop_mask = pack(
            pool.vocabulary.stop_token_ids[:1], pool.vocabulary.padded_vocab_size
        )

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto"
    ) -> Future[Grammar]:
        if request_id in self._grammars:
            raise ValueError(f"request {request_id!r} is already initialized")
        future = self._pool.compile(constraint, candidates(constraint.kind, backend))
        self._grammars[request_id] = future
        return future

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: LogitsRows = None,
        batch: int | None = None,
    ) -> None:
        if batch is None or batch != self._batch:
            self._open(sequences)
            if logits_rows is None:
                logits_rows = range(len(sequences))
            self._logits_rows = np.asarray(logits_rows, np.intp)
            self._batch = batch
        self._kernel.wait()  # the workers overwrite the masks
        self._pool.submit(sequences, batch)
        self._prepared = sequences

    def _open(self, sequences: Sequence[GuidedSequence]) -> None:
        """Open the sequences that are not open."""
        if len({sequence.sequence_id for sequence in sequences}) < len(sequences):
            raise ValueError(
                "a sequence id occurs twice in this step: each sequence needs its own"
            )
        self._is_timed = False
        for sequence in sequences:
            self._is_timed |= sequence.mask_seconds is not None
            known = self._sequences.get(sequence.sequence_id)
            if known is None:
                self._pool.open(sequence, self._grammar(sequence.request_id))
                self._sequences[sequence.sequence_id] = sequence
            elif known.request_id != sequence.request_id:
                owner = f"belongs to request {known.request_id!r}"
                raise ValueError(
                    f"sequence id {sequence.sequence_id} {owner}: free that first"
                )

    def _grammar(self, request_id: str) -> Grammar:
        future = self._grammars.get(request_id)
        if future is None:
            raise ValueError(f"request {request_id!r} is not initialized")
        if not future.done():
            raise ValueError(
                f"the grammar of request {request_id!r} is still being compiled"
            )
        return future.result()

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport:
        width = self.vocabulary.padded_vocab_size
        if self._prepared and logits.shape[-1] < width:
            raise ValueError(
                f"the logits have {logits.shape[-1]} columns and the vocabulary {width}: pass whole rows"
            )
        sequences = self._take_prepared("apply")
        if sequences and deadline is not None and logits.is_cuda:
            step, started = collect_during(self._pool, logits, deadline)
        else:
            started = time.perf_counter()
            step = self._pool.collect(deadline)
        if step.late and deadline is not None and len(step.late) == len(logits):
            until = started + FIRST_MASK_SECONDS
            late = self._sequences.keys() - self._pool.decided(self._sequences)
            late.update(sequence.sequence_id for sequence in sequences)
            wait_for_first(self._pool, late, until)
            self._pool.submit(sequences, self._batch)
            again = self._pool.collect(0.0)
            again.seconds += step.seconds
            step = again
        waited = time.perf_counter()
        report = self._report(sequences, step, waited - started)
        masks = [(part.masks, part.slots) for part in step.ready]
        rows = [self._logits_rows[part.rows] for part in step.ready]
        closed = self._without_mask(step)
        masks.append((self._stop_mask[None], np.zeros(len(closed), np.intp)))
        rows.append(closed)
        self._kernel.apply(logits, masks, np.concatenate(rows))
        report.kernel_seconds = time.perf_counter() - waited
        return report

    def collect(
        self,
        bitmask: NDArray[np.int32],
        deadline: float | None = None,
        patience: float = 0.0,
    ) -> ApplyReport:
        """Copy the masks, instead of `apply`: for an engine that writes -inf itself.

        Args:
            bitmask: int32 `[rows, words]`. Line i gets the mask of the sequence with
                logits row i. Lines of failed and late sequences allow a stop token
                only.
            deadline: seconds to wait at most. None: as for `apply`.
            patience: what a late sequence loses, in seconds. The wait goes on while it
                costs the batch less than that: for another `patience` times the share
                of late sequences.
        """
        sequences = self._take_prepared("collect")
        started = time.perf_counter()
        step = self._pool.collect(deadline)
        if step.late:
            step = wait_for_share(self._pool, step, patience / len(sequences))
        report = self._report(sequences, step, time.perf_counter() - started)
        for part in step.ready:
            bitmask[self._logits_rows[part.rows]] = part.masks[part.slots]
        bitmask[self._without_mask(step)] = self._stop_mask
        return report

    def _take_prepared(self, method: str) -> Sequence[GuidedSequence]:
        """Return the prepared step, which `method` finishes."""
        if self._prepared is None:
            raise RuntimeError(f"{method}() without prepare()")
        sequences = self._prepared
        self._prepared = None
        return sequences

    def _without_mask(self, step: StepMasks) -> NDArray[np.intp]:
        """Return the logits rows of a step that have no mask."""
        return self._logits_rows[[*step.failed, *step.late]]

    def _report(
        self, sequences: Sequence[GuidedSequence], step: StepMasks, wait_seconds: float
    ) -> ApplyReport:
        """Return the report of a step, and close the sequences that failed."""
        report = ApplyReport(wait_seconds=wait_seconds, mask_seconds=step.seconds)
        self._forced = [
            (sequences[row], len(sequences[row].output_token_ids), run)
            for row, run in step.forced.items()
        ]
        report.vetoes = {
            sequences[row].sequence_id: veto for row, veto in step.vetoes.items()
        }
        report.late = [sequences[row].sequence_id for row in step.late]
        if self._is_timed:
            for part in step.ready:
                for slot, row in zip(part.slots, part.rows, strict=True):
                    if (sequence := sequences[row]).mask_seconds is not None:
                        sequence.mask_seconds += float(part.seconds[slot])
        if step.failed:
            report.failed = {
                sequences[row].sequence_id: error for row, error in step.failed.items()
            }
            self._close(list(report.failed))
        return report

    def edits(
        self,
        sequences: Sequence[GuidedSequence],
        samples: Sequence[SequenceOutput | None] = (),
    ) -> dict[int, SampledEdit]:
        """Append the tokens that have no alternative, if the pool looks ahead."""
        edits: dict[int, SampledEdit] = {}
        for sequence, length, (first, *others) in self._forced:
            output = sequence.output_token_ids
            if others and len(output) == length + 1 and output[-1] == first:
                edits[sequence.sequence_id] = SampledEdit(append=others)
        return edits

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        return self._pool.decided(sequence_ids)

    def rollback(self, sequence_id: int, length: int) -> None:
        self._pool.rollback(sequence_id, length)

    def free(self, request_id: str) -> None:
        self._grammars.pop(request_id, None)
        opened = self._sequences.values()
        own = [sequence for sequence in opened if sequence.request_id == request_id]
        self._close([sequence.sequence_id for sequence in own])

    def free_sequence(self, sequence_id: int) -> None:
        self._close([sequence_id])

    def _close(self, sequence_ids: Collection[int]) -> None:
        self._kernel.wait()  # other sequences get their slots
        self._pool.free(sequence_ids)
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
