"""InlinePool: one mask worker in the calling process. The real thing for tests and small embeddings.

It has no isolation: a grammar library that hangs or crashes takes the caller with it. `actors.RayPool` has.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from guided.backends import BACKENDS, Backends
from guided.bitmask import words
from guided.compilation import compile_constraint, grammar_key
from guided.constraint import Constraint
from guided.errors import GuidedError, from_wire
from guided.grammar_cache import CacheKey, GrammarCache, cache_key
from guided.messages import FillRow, OpenSequence, RowResult, RowStatus, StepRequest
from guided.pool import BackendStatus, Fill, Grammar, PoolStatus, ReadyRows, Row, StepMasks, WorkerStatus
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

__all__ = ["InlinePool"]

_STATES: dict[RowStatus, Literal["ready", "needs_history", "failed"]] = {
    RowStatus.READY: "ready",
    RowStatus.NEEDS_HISTORY: "needs_history",
    RowStatus.FAILED: "failed",
}


class InlinePool:
    """A `MaskPool` without processes: compiles in `compile()`, fills in `collect()`, straight into the caller's rows.

    Args:
        vocabulary: what the masks are over.
        backends: shared tokenizer data, where the caller has some already.
        max_cache_bytes: what compiled grammars that nobody uses may weigh together.
    """

    def __init__(
        self, vocabulary: Vocabulary, backends: Backends | None = None, max_cache_bytes: int = 256 << 20
    ) -> None:
        self._vocabulary = vocabulary
        self._backends = backends or Backends(vocabulary)
        self._cache = GrammarCache(max_cache_bytes)
        self._worker = MaskWorker(vocabulary)
        self._opens: dict[int, OpenSequence] = {}
        self._frees: list[int] = []
        self._fills: Sequence[Fill] = ()
        self._masks: NDArray[np.int32] = np.empty((0, words(vocabulary.padded_vocab_size)), np.int32)
        self._step = 0

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        key = cache_key(constraint, backends)
        future, new = self._cache.acquire(key)
        if new:
            try:
                future.set_result(self._compile(constraint, backends, key))
            except GuidedError as error:
                for name in self._cache.fail(key, error):
                    self._worker.uninstall(name)
                future.set_exception(error)
        return future

    def _compile(self, constraint: Constraint, backends: Sequence[str], key: CacheKey) -> Grammar:
        compiled = compile_constraint(self._backends, constraint, backends)
        name = grammar_key(compiled.backend, constraint)
        grammar = Grammar(name, compiled.backend, constraint, key, compiled.seconds)
        self._worker.install(name, compiled.grammar)
        self._cache.weigh(grammar, compiled.grammar.nbytes)
        return grammar

    def release(self, grammar: Grammar) -> None:
        for key in self._cache.release(grammar):
            self._worker.uninstall(key)

    def open(self, sequence_id: int, grammar: Grammar, parent_id: int | None = None) -> None:
        self._opens[sequence_id] = OpenSequence(sequence_id, grammar.key, parent_id)

    def free(self, sequence_ids: Collection[int]) -> None:
        for sequence_id in sequence_ids:
            self._opens.pop(sequence_id, None)
            self._frees.append(sequence_id)

    def submit(self, fills: Sequence[Fill]) -> None:
        self._fills = fills
        self._step += 1

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> StepMasks:
        """Does the work, here and now: neither `timeout` nor `patience` can be kept, and no row is late."""
        count = len(self._fills)
        if len(self._masks) < count:
            self._masks = np.empty((2 * count, self._masks.shape[1]), np.int32)
        step = StepMasks(count, [])
        ready: list[int] = []
        for index, result in enumerate(self._results(self._masks)):
            step.seconds += result.seconds
            if result.status is RowStatus.READY:
                ready.append(index)
            else:
                error = from_wire(result.error) if result.error else None
                step.other[index] = Row(_STATES[result.status], result.seconds, error)
        places = np.array(ready, np.intp)
        step.ready.append(ReadyRows(self._masks, places, places))
        if bitmask is not None:
            step.copy_to(bitmask)
        return step

    def _results(self, bitmask: NDArray[np.int32]) -> Iterator[RowResult]:
        fills = [FillRow(fill.sequence_id, row, fill.start, list(fill.tokens)) for row, fill in enumerate(self._fills)]
        opens = [self._opens.pop(fill.sequence) for fill in fills if fill.sequence in self._opens]
        frees, self._frees, self._fills = self._frees, [], ()
        return self._worker.handle(StepRequest(0, self._step, fills, opens, frees), bitmask)

    def settled(self, sequence_ids: Collection[int], timeout: float) -> list[int]:
        """All of them: nothing is ever under way here."""
        return list(sequence_ids)

    def failures(self) -> dict[int, GuidedError]:
        """Nothing is ever lost here: a worker in the caller dies with the caller."""
        return {}

    def status(self) -> PoolStatus:
        me = WorkerStatus(0, 0, "up", os.getpid(), platform.node(), self._worker.num_open, 0)
        return PoolStatus("inline", [me], backends=[BackendStatus(name) for name in BACKENDS])

    def shutdown(self) -> None:
        self._opens.clear()
