"""GuidedProcessor: the standard post-processor. It masks constrained rows with the bitmasks of a pool.

`decode_step` is one step of a decode loop with it. `docs/embedding.md` shows the calls that it makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from guided.backends import candidates
from guided.bitmask import pack, words
from guided.constraint import Constraint
from guided.pools.protocol import Grammar, MaskPool, StepMasks
from guided.processors.kernel import BitmaskKernel, end_of_work
from guided.processors.logit_post_processor import ApplyReport, LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence, SequenceOutput

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from guided.processors.logit_post_processor import LogitsRows

FIRST_MASK_SECONDS = 0.1
"""Minimum deadline for a step's first mask if no other row can be sampled. It delays new requests by up to this."""
_LOOK_SECONDS = 0.0002
"""Interval between looks at masks and device."""


class GuidedProcessor(LogitPostProcessor):
    """The standard `LogitPostProcessor`. It computes masks with `pool`, which the caller shuts down."""

    all_rows = False

    def __init__(self, pool: MaskPool) -> None:
        self._pool = pool
        self._kernel = BitmaskKernel()
        self.vocabulary = pool.vocabulary
        """The vocabulary of the masks."""
        self._grammars: dict[str, Future[Grammar]] = {}
        """The grammars of requests, by request id."""
        self._sequences: dict[int, GuidedSequence] = {}
        """The open sequences, by id."""
        self._batch: int | None = None
        """The number of the last batch."""
        self._is_timed = False
        """Whether a sequence of the batch has `mask_seconds`."""
        self._prepared: Sequence[GuidedSequence] | None = None
        """The sequences of the prepared step, until `apply` or `collect` finishes it."""
        self._logits_rows: NDArray[np.intp] = np.empty(0, np.intp)
        """The logits row of each sequence of the batch."""
        self._forced: list[tuple[GuidedSequence, int, list[int]]] = []
        """The forced tokens of this step: `(sequence, length of its output, StepMasks.forced)`."""
        self._stop_mask = pack(pool.vocabulary.stop_token_ids[:1], pool.vocabulary.padded_vocab_size)

    def initialize(self, request_id: str, constraint: Constraint, backend: str = "auto") -> Future[Grammar]:
        if request_id in self._grammars:
            raise ValueError(f"request {request_id!r} is already initialized")
        future = self._pool.compile(constraint, candidates(constraint.kind, backend))
        self._grammars[request_id] = future
        return future

    def prepare(
        self, sequences: Sequence[GuidedSequence], logits_rows: LogitsRows = None, batch: int | None = None
    ) -> None:
        if self._prepared is not None:
            raise RuntimeError("prepare() was called twice without apply() between")
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
            raise ValueError("a sequence id occurs twice in this step: each sequence needs its own")
        self._is_timed = False
        for sequence in sequences:
            self._is_timed |= sequence.mask_seconds is not None
            known = self._sequences.get(sequence.sequence_id)
            if known is None:
                self._pool.open(sequence, self._grammar(sequence.request_id))
                self._sequences[sequence.sequence_id] = sequence
            elif known.request_id != sequence.request_id:
                owner = f"belongs to request {known.request_id!r}"
                raise ValueError(f"sequence id {sequence.sequence_id} {owner}: free that first")

    def _grammar(self, request_id: str) -> Grammar:
        future = self._grammars.get(request_id)
        if future is None:
            raise ValueError(f"request {request_id!r} is not initialized")
        if not future.done():
            raise ValueError(f"the grammar of request {request_id!r} is still being compiled")
        return future.result()

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport:
        width = self.vocabulary.padded_vocab_size
        if self._prepared and logits.shape[-1] < width:
            raise ValueError(f"the logits have {logits.shape[-1]} columns and the vocabulary {width}: pass whole rows")
        sequences = self._take_prepared("apply")
        if deadline is not None and sequences:
            computed = end_of_work(logits)
        else:
            computed = None
        step, report = self._collect(sequences, deadline, len(logits) == len(sequences), computed)
        started = time.perf_counter()
        masks = [(part.masks, part.slots) for part in step.ready]
        rows = [self._logits_rows[part.rows] for part in step.ready]
        closed = self._without_mask(step)
        masks.append((self._stop_mask[None], np.zeros(len(closed), np.intp)))
        rows.append(closed)
        self._kernel.apply(logits, masks, np.concatenate(rows))
        report.kernel_seconds = time.perf_counter() - started
        return report

    def collect(self, bitmask: NDArray[np.int32], deadline: float | None = None, patience: float = 0.0) -> ApplyReport:
        """Copy the masks, instead of `apply`: for an engine that writes -inf itself.

        Args:
            bitmask: int32 `[rows, words]`. Line i gets the mask of the sequence with logits row i. Lines of failed and
                late sequences allow a stop token only.
            deadline: seconds to wait at most. None: as for `apply`.
            patience: what a late sequence loses, in seconds. The wait goes on while it costs the batch less than
                that: for another `patience` times the share of late sequences.
        """
        step, report = self._collect(self._take_prepared("collect"), deadline, alone=False, patience=patience)
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

    def _collect(
        self,
        sequences: Sequence[GuidedSequence],
        deadline: float | None,
        alone: bool,
        computed: Any = None,
        patience: float = 0.0,
    ) -> tuple[StepMasks, ApplyReport]:
        """Wait for the masks of the step, and report them.

        Args:
            alone: no other row of the batch can be sampled.
            computed: a `torch.cuda.Event` from which the deadline counts. Masks that are there before it do not wait.
        """
        if computed is not None:
            step = self._pool.collect(0.0)
            while step.late and not computed.query():
                time.sleep(_LOOK_SECONDS)  # a pool may wait longer, up to a millisecond
                step = self._pool.collect(0.0)
        started = time.perf_counter()
        if computed is None or step.late:
            step = self._pool.collect(deadline)
        waited = time.perf_counter()
        while step.late and time.perf_counter() - waited < patience * len(step.late) / len(sequences):
            step = self._pool.collect(_LOOK_SECONDS)
        if alone and deadline is not None and sequences and len(step.late) == len(sequences):
            step = self._wait_for_first(sequences, started + FIRST_MASK_SECONDS, step.seconds)
        return step, self._report(sequences, step, time.perf_counter() - started)

    def _report(self, sequences: Sequence[GuidedSequence], step: StepMasks, wait_seconds: float) -> ApplyReport:
        """Return the report of a step, and close the sequences that failed."""
        report = ApplyReport(wait_seconds=wait_seconds, mask_seconds=step.seconds)
        self._forced = [(sequences[row], len(sequences[row].output_token_ids), run) for row, run in step.forced.items()]
        report.vetoes = {sequences[row].sequence_id: veto for row, veto in step.vetoes.items()}
        report.late = [sequences[row].sequence_id for row in step.late]
        if self._is_timed:
            for part in step.ready:
                for slot, row in zip(part.slots, part.rows, strict=True):
                    if (sequence := sequences[row]).mask_seconds is not None:
                        sequence.mask_seconds += float(part.seconds[slot])
        if step.failed:
            report.failed = {sequences[row].sequence_id: error for row, error in step.failed.items()}
            self._close(list(report.failed))
        return report

    def _wait_for_first(self, sequences: Sequence[GuidedSequence], until: float, seconds: float) -> StepMasks:
        """Wait until a late sequence is decided, of this step or of an earlier one. Then collect the step again."""
        late = self._sequences.keys() - self._pool.decided(self._sequences)
        late.update(sequence.sequence_id for sequence in sequences)
        while not self._pool.decided(late) and time.perf_counter() < until:
            time.sleep(_LOOK_SECONDS)
        self._pool.submit(sequences, self._batch)
        step = self._pool.collect(0.0)
        step.seconds += seconds
        return step

    def edits(
        self, sequences: Sequence[GuidedSequence], samples: Sequence[SequenceOutput | None] = ()
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

    def free(self, request_id: str) -> None:
        self._grammars.pop(request_id, None)
        self._close([number for number, sequence in self._sequences.items() if sequence.request_id == request_id])

    def rollback(self, sequence_id: int, length: int) -> None:
        self._pool.rollback(sequence_id, length)

    def free_sequence(self, sequence_id: int) -> None:
        self._close([sequence_id])

    def _close(self, sequence_ids: Collection[int]) -> None:
        self._kernel.wait()  # other sequences get their slots
        self._pool.free(sequence_ids)
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)


@dataclass(slots=True)
class DecodeStep:
    """The result of one step."""

    tokens: list[int]
    """The sampled token of each logits row. Ignore those of failed and late sequences."""
    report: ApplyReport
    """The report about the sequences that failed or are late."""
    ended: list[int] = field(default_factory=list)
    """Ids of sequences that sampled a stop token. It is not appended. Do not decode them again."""


def decode_step(
    processor: GuidedProcessor,
    sequences: Sequence[GuidedSequence],
    forward: Callable[[], torch.Tensor],
    sample: Callable[[torch.Tensor], Sequence[int]],
    logits_rows: Sequence[int] | None = None,
    deadline: float | None = None,
) -> DecodeStep:
    """Prepare the masks, run the forward pass, apply the masks, sample, and append the tokens to the outputs.

    Args:
        sequences: the constrained sequences of the batch, with lists as `output_token_ids`.
        forward: returns the logits, float `[rows, >= padded_vocab_size]`. The masks are computed meanwhile.
        sample: returns one token for each logits row.
        logits_rows: the logits row of each sequence. None: row i for sequence i.
        deadline: seconds to wait for masks after the forward pass. A sequence without a mask by then is late: decode it
            again when `processor.decided` returns it. None: wait for every mask.

    Tokens of failed and late sequences are not appended. If the pool looks ahead (`forced_tokens`), the forced tokens
    are appended too, so an output may grow by several tokens.
    """
    if logits_rows is None:
        logits_rows = range(len(sequences))
    processor.prepare(sequences, logits_rows)
    try:
        logits = forward()
    except BaseException:  # each `prepare` is followed by one `apply` or `collect`
        rows = 1 + max(logits_rows, default=-1)
        processor.collect(np.empty((rows, words(processor.vocabulary.padded_vocab_size)), np.int32), 0.0)
        raise
    report = processor.apply(logits, deadline)
    step = DecodeStep([int(token) for token in sample(logits)], report)
    for row, sequence in zip(logits_rows, sequences, strict=True):
        if sequence.sequence_id not in report.failed and sequence.sequence_id not in report.late:
            _append(processor, sequence, [step.tokens[row]], step)
    edits = processor.edits(sequences)
    for sequence in sequences:
        if sequence.sequence_id in edits:
            _append(processor, sequence, edits[sequence.sequence_id].append, step)
    return step


def _append(processor: GuidedProcessor, sequence: GuidedSequence, tokens: Sequence[int], step: DecodeStep) -> None:
    """Append to the output, up to a stop token."""
    for token in tokens:
        if token in processor.vocabulary.stop_token_ids:
            step.ended.append(sequence.sequence_id)
            return
        cast("list[int]", sequence.output_token_ids).append(token)
