"""InlinePool: one mask worker in the calling process, for tests and small embeddings.

It has no isolation: a grammar library that hangs or crashes takes the caller with it.
`actors.RayPool` isolates it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from guided.backends import BACKENDS, Backends
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.masks.compilation import compile_constraint
from guided.masks.worker import MaskWorker
from guided.pools.grammar_cache import DEFAULT_CACHE_BYTES, GrammarCache
from guided.pools.protocol import (
    MAX_FORCED_TOKENS,
    Grammar,
    ReadyMasks,
    StepMasks,
    forced_runs,
)
from guided.pools.status import BackendStatus, PoolStatus, WorkerStatus
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary


class InlinePool:
    """A `MaskPool` without processes: `compile()` compiles, `collect()` fills the
    masks.

    Args:
        max_cache_bytes: size of the cache of compiled grammars (see `GrammarCache`).
        forced_tokens: look ahead where a mask allows only one token
            (`StepMasks.forced`).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_cache_bytes: int = DEFAULT_CACHE_BYTES,
        forced_tokens: bool = False,
    ) -> None:
        self._forced_tokens = forced_tokens
        self.vocabulary = vocabulary
        self._backends = Backends(vocabulary)
        self._cache = GrammarCache(max_cache_bytes)
        self._worker = MaskWorker(vocabulary)
        self.sequences: dict[int, GuidedSequence] = {}
        """The open sequences, by id. It is also the worker's slot."""
        self._step: Sequence[GuidedSequence] = ()
        self._masks: NDArray[np.int32] = np.empty(
            (0, words(vocabulary.padded_vocab_size)), np.int32
        )

    def compile(
        self, constraint: Constraint, backends: Sequence[str]
    ) -> Future[Grammar]:
        return self._cache.get(
            constraint, backends, partial(self._compile, constraint, backends)
        )

    def _compile(
        self, constraint: Constraint, backends: Sequence[str], key: str
    ) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        try:
            made = compile_constraint(self._backends, constraint, backends)
        except GuidedError as error:
            future.set_exception(error)
        else:
            grammar = made.grammar
            future.set_result(
                Grammar(
                    key,
                    made.backend,
                    constraint,
                    made.seconds,
                    checked=grammar.checked,
                    nbytes=made.nbytes,
                    compiled=grammar,
                )
            )
        return future

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        assert grammar.compiled is not None
        self.sequences[sequence.sequence_id] = sequence
        self._worker.open(
            sequence.sequence_id,
            grammar.compiled,
            [*sequence.output_token_ids],
            budget=sequence.budget,
            final=sequence.final,
        )

    def free(self, sequence_ids: Collection[int]) -> None:
        self._worker.free(sequence_ids)
        for sequence_id in sequence_ids:
            self.sequences.pop(sequence_id, None)

    def rollback(self, sequence_id: int, length: int) -> None:
        if length < self._worker.length(sequence_id):
            self._worker.edit(sequence_id, length, ())

    def submit(
        self, sequences: Sequence[GuidedSequence], batch: int | None = None
    ) -> None:
        self._step = sequences

    def collect(self, deadline: float | None = None) -> StepMasks:
        """Compute the masks now, without a deadline."""
        sequences = self._step
        self._step = ()
        if len(self._masks) < len(sequences):
            self._masks = np.empty((2 * len(sequences), self._masks.shape[1]), np.int32)
        runs = np.empty((len(sequences), MAX_FORCED_TOKENS), np.int32)
        seconds = np.zeros(len(sequences), np.float32)
        step = StepMasks()
        started = time.perf_counter()
        ready: list[int] = []
        for row, sequence in enumerate(sequences):
            began = time.perf_counter()
            error = self._fill(sequence, self._masks[row])
            seconds[row] = time.perf_counter() - began
            if error is None:
                ready.append(row)
                vetoed = self._worker.vetoed.get(sequence.sequence_id)
                if vetoed is not None:
                    step.note(row, sequence, vetoed.report())
                if self._forced_tokens:
                    self._worker.look_ahead(
                        sequence.sequence_id, self._masks[row], runs[row]
                    )
            else:
                step.failed[row] = error
        if sequences:
            rows = np.array(ready, np.intp)
            if self._forced_tokens:
                step.forced = forced_runs(runs[rows], rows)
            step.ready.append(ReadyMasks(self._masks, rows, rows, seconds))
            step.seconds = time.perf_counter() - started
        return step

    def _fill(
        self, sequence: GuidedSequence, mask: NDArray[np.int32]
    ) -> GuidedError | None:
        slot = sequence.sequence_id
        tokens = sequence.output_token_ids
        known = self._worker.length(slot)
        if known > len(tokens):
            self._worker.edit(slot, len(tokens), ())
        error = self._worker.fill(slot, tokens[known:], mask)
        sequence.steered = slot in self._worker.steered
        return error

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        return list(sequence_ids)  # no row is ever late

    def status(self) -> PoolStatus:
        worker = WorkerStatus(
            0, 0, "up", os.getpid(), platform.node(), self._worker.num_open, 0
        )
        return PoolStatus(
            "inline", [worker], backends=[BackendStatus(name) for name in BACKENDS]
        )

    def shutdown(self) -> None:
        self._worker.free(self.sequences)
        self.sequences.clear()
