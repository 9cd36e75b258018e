"""A mask pool that fails on demand. Its masks are real."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np

from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, WorkerDied
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, ReadyMasks, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary


class FaultyPool(InlinePool):
    """An `InlinePool` that fails rows, or makes them late, as told.

    `fails(sequence_id, position)` says which rows fail; `delay(sequence_id, position)`
    how often `decided` is called before a row's mask is there; `lose` loses an open
    sequence; with `hold_compiles` the futures of `compile` stay open until
    `finish_compiles`.
    """

    def __init__(self, vocabulary: Vocabulary, forced_tokens: bool = False) -> None:
        super().__init__(vocabulary, forced_tokens=forced_tokens)
        self.fails: Callable[[int, int], bool] = lambda sequence_id, position: False
        self.delay: Callable[[int, int], int] = lambda sequence_id, position: 0
        self.late: dict[int, int] = {}
        """By late sequence: the number of `decided` calls until its mask is ready."""
        self._asked: dict[int, int] = {}
        """By sequence: the position of the last mask that was asked for."""
        self.hold_compiles = False
        self.opened: list[int] = []
        self.freed: set[int] = set()
        self._held: list[tuple[Future[Grammar], Future[Grammar]]] = []
        self._lost: dict[int, GuidedError] = {}
        self._rows: Sequence[GuidedSequence] = ()
        self._computed: StepMasks | None = None

    def compile(
        self, constraint: Constraint, backends: Sequence[str]
    ) -> Future[Grammar]:
        real = super().compile(constraint, backends)
        if not self.hold_compiles:
            return real
        held: Future[Grammar] = Future()
        self._held.append((held, real))
        return held

    def finish_compiles(self) -> None:
        for held, real in self._held:
            error = real.exception()
            if error is None:
                held.set_result(real.result())
            else:
                held.set_exception(error)
        self._held.clear()

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        self.opened.append(sequence.sequence_id)
        super().open(sequence, grammar)

    def free(self, sequence_ids: Collection[int]) -> None:
        self.freed.update(sequence_ids)
        for sequence_id in sequence_ids:
            self.late.pop(sequence_id, None)
            self._asked.pop(sequence_id, None)
        super().free(sequence_ids)

    def submit(
        self, sequences: Sequence[GuidedSequence], batch: int | None = None
    ) -> None:
        self._rows = sequences
        self._computed = None
        super().submit(sequences, batch)

    def collect(self, deadline: float | None = None) -> StepMasks:
        step = self._computed or super().collect(deadline)
        self._computed = step  # it may be collected again
        late: list[int] = []
        for row, sequence in enumerate(self._rows):
            position = len(sequence.output_token_ids)
            if self.fails(sequence.sequence_id, position):
                step.failed[row] = BackendError("told to fail")
            elif sequence.sequence_id in self._lost:
                step.failed[row] = self._lost[sequence.sequence_id]
            elif row not in step.failed and self._is_late(
                sequence.sequence_id, position, deadline is None
            ):
                late.append(row)
        return without_rows(step, late)

    def _is_late(self, sequence_id: int, position: int, waits: bool) -> bool:
        if self._asked.get(sequence_id) != position:
            self._asked[sequence_id] = position
            self.late[sequence_id] = self.delay(sequence_id, position)
        if waits or self.late.get(sequence_id, 0) <= 0:
            self.late.pop(sequence_id, None)
            return False
        return True

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        for sequence_id in self.late.keys() & sequence_ids:
            self.late[sequence_id] -= 1
        return [
            number
            for number in sequence_ids
            if self.late.get(number, 0) <= 0 or number in self._lost
        ]

    def lose(self, sequence_id: int, error: GuidedError | None = None) -> None:
        self._lost[sequence_id] = error or WorkerDied("told to die")


def without_rows(step: StepMasks, late: Collection[int]) -> StepMasks:
    """The same step, in which these rows are late, and failed rows have no mask."""
    kept: list[ReadyMasks] = []
    for part in step.ready:
        keep = np.array(
            [row not in late and row not in step.failed for row in part.rows.tolist()],
            bool,
        )
        kept.append(
            ReadyMasks(part.masks, part.slots[keep], part.rows[keep], part.seconds)
        )
    forced = {
        row: run
        for row, run in step.forced.items()
        if row not in late and row not in step.failed
    }
    return StepMasks(kept, [*step.late, *late], step.failed, step.seconds, forced)
