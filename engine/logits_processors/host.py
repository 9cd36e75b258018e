"""Host: runs one logits processor on the batches of an engine."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial

import torch

from engine.logits_processors.batch import PersistentBatch
from engine.logits_processors.interface import LogitsProcessor, VllmConfig, is_revised
from engine.logits_processors.revised import RevisedAdapter
from engine.sequence import Sequence


class Host:
    """Creates and runs one logits processor. Exceptions of the processor pass through; call `restart` after one.

    A late sequence stays in the batch, so that the processor keeps its state of it.
    """

    def __init__(self, kind: type[LogitsProcessor], config: VllmConfig, device: torch.device) -> None:
        self.name = kind.__name__
        make = partial(RevisedAdapter, kind) if is_revised(kind) else kind
        self._make = partial(make, config, device, device.type == "cuda")
        self.restart()
        self.argmax_invariant: bool = self._processor.is_argmax_invariant()

    def restart(self) -> None:
        """Replace the processor by a new instance without state. Raises what its constructor raises."""
        self._batch = PersistentBatch()
        self._late: list[Sequence] = []
        """Late sequences at the end of the batch. They have no logits in this step."""
        self._processor: LogitsProcessor = self._make()

    def begin(self, rows: Rows[Sequence]) -> None:
        """Announce the next batch."""
        self._late = [row for row in self._batch.rows if row.is_late]
        self._processor.update_state(self._batch.update([*rows, *self._late]))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process the logits of the announced rows, float32 `[rows, vocab]`."""
        rows = logits
        if self._late:
            rows = torch.cat([logits, logits.new_zeros(len(self._late), logits.shape[1])])
        after: object = self._processor.apply(rows)
        if not isinstance(after, torch.Tensor):
            raise TypeError(f"{self.name}.apply returned {type(after).__name__} instead of the logits")
        if after.shape != rows.shape:
            raise ValueError(f"{self.name}.apply returned shape {tuple(after.shape)} for {tuple(rows.shape)}")
        return after[: len(logits)].to(logits)
