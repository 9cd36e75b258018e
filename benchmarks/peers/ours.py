"""Masks of a pool (inline or Ray) through `GuidedProcessor`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.loop import SleepingForward, Times, Way
from benchmarks.peers.rows import Document, RunningSequence
from guided.constraint import Constraint
from guided.errors import DeadEnd, GuidedError
from guided.pools.protocol import Grammar, MaskPool
from guided.processors.guided_processor import GuidedProcessor
from guided.sequence import GuidedSequence

COMPILE_SECONDS = 600.0
"""Time limit for all compilations together. The pool limits each of them."""


class Guided(Way):
    """Mask with the standard post-processor over a pool, called as in this project's
    engine.

    Args:
        has_deadline: whether to continue without rows without a mask at the engine's
            default deadline.
    """

    def __init__(self, pool: MaskPool, has_deadline: bool) -> None:
        self._pool = pool
        self._has_deadline = has_deadline
        self._processor = GuidedProcessor(pool)
        self._mean_step = 0.0
        self._late: set[int] = set()
        """Ids of sequences that wait for a late mask."""
        self._backend = ""
        self._grammars: dict[tuple[str, str], Future[Grammar]] = {}
        self._guided: dict[int, GuidedSequence] = {}
        self._batch: list[GuidedSequence] = []
        self._number = 0
        """The number of the batch."""
        self._logits_rows: NDArray[np.intp] = np.empty(0, np.intp)
        self._changed = True
        """Whether the batch differs from that of the last step."""

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        self._backend = backend
        for document in documents:
            key = (backend, document.schema)
            if key not in self._grammars:
                self._grammars[key] = self._pool.compile(
                    Constraint.json_schema(document.schema), [backend]
                )
        refused: dict[str, str] = {}
        for document in documents:
            try:
                self._check(
                    document,
                    self._grammars[backend, document.schema].result(COMPILE_SECONDS),
                )
            except GuidedError as error:
                refused[document.name] = str(error)
        return refused

    def _check(self, document: Document, grammar: Grammar) -> None:
        """Raise an error if the grammar does not accept a document to its end."""
        sequence = GuidedSequence("check", -1, list(document.tokens))
        self._pool.open(sequence, grammar)
        self._pool.submit([sequence])
        found = self._pool.collect()
        self._pool.free([sequence.sequence_id])
        if found.failed:
            raise found.failed[0]
        [part] = [part for part in found.ready if len(part.rows)]
        stop = self._pool.vocabulary.stop_token_ids[0]
        if not part.masks[part.slots[0], stop // 32] >> (stop % 32) & 1:
            raise DeadEnd("it may not end where it ends")

    def begin(self) -> None:
        self._processor = GuidedProcessor(self._pool)
        self._late.clear()
        self._mean_step = 0.0

    def open(self, sequence: RunningSequence) -> None:
        request, constraint = (
            str(sequence.id),
            Constraint.json_schema(sequence.document.schema),
        )
        future = self._processor.initialize(request, constraint, self._backend)
        future.result(COMPILE_SECONDS)
        self._guided[sequence.id] = GuidedSequence(
            request, sequence.id, sequence.output
        )
        self._changed = True

    def close(self, sequence: RunningSequence) -> None:
        self._processor.free(str(sequence.id))
        self._guided.pop(sequence.id, None)
        self._late.discard(sequence.id)
        self._changed = True

    def step(
        self, sequences: Sequence[RunningSequence], forward: SleepingForward
    ) -> tuple[torch.Tensor, Times]:
        again = self._take_decided(len(sequences)) if self._late else 0
        if self._changed:  # as `engine.sampling_metadata` does
            running = [
                sequence for sequence in sequences if sequence.id not in self._late
            ]
            self._batch = [self._guided[sequence.id] for sequence in running]
            self._number += 1
            self._logits_rows = np.array(
                [sequence.row for sequence in running], np.intp
            )
            self._changed = False
        started = time.perf_counter()
        self._processor.prepare(self._batch, self._logits_rows, self._number)
        prepared = time.perf_counter() - started
        forward.start()
        logits = forward.wait()
        report = self._processor.apply(logits, self._deadline())
        ended = time.perf_counter()
        exposed = prepared + report.wait_seconds
        times = Times(
            exposed=exposed,
            hidden=max(0.0, report.mask_seconds - exposed),
            kernel=report.kernel_seconds,
            again=again,
        )
        self._changed = bool(report.late or report.failed)
        self._late.update(report.late)
        for sequence in sequences:
            if sequence.id in self._late:
                times.late.add(sequence.row)
            elif sequence.id in report.failed:
                logits[sequence.row] = float("-inf")
        step = ended - started - report.wait_seconds
        self._mean_step += 0.1 * (step - self._mean_step) if self._mean_step else step
        return logits, times

    def _take_decided(self, rows: int) -> int:
        """Run decided late sequences again, or all late sequences if no other can run.
        Returns their number."""
        decided = set(self._processor.decided(self._late))
        if not decided and len(self._late) == rows:
            decided = self._late.copy()
        self._late -= decided
        self._changed |= bool(decided)
        return len(decided)

    def _deadline(self) -> float | None:
        """Return the deadline for masks in seconds, as in the engine. None: wait for
        all masks."""
        return max(0.001, 0.05 * self._mean_step) if self._has_deadline else None

    def sampled(
        self, sequences: Sequence[RunningSequence], tokens: Sequence[int]
    ) -> float:
        """The next `prepare` reads the outputs."""
        return 0.0
