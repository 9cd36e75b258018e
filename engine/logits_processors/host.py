"""Hosts: one interface to logits processors of both programming models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits_processors.batch import PersistentBatch, RequestIndices
from engine.logits_processors.interface import LogitsProcessor, VllmConfig
from engine.sequence import Sequence


class Host(ABC):
    """Creates and runs one logits processor. Exceptions of the processor pass through; call `restart` after one."""

    def __init__(self, kind: type[LogitsProcessor], config: VllmConfig, device: torch.device) -> None:
        self.name = kind.__name__
        self._make = partial(kind, config, device, device.type == "cuda")
        self._processor: Any = self._make()
        self.argmax_invariant: bool = self._processor.is_argmax_invariant()

    @abstractmethod
    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        """Announce the next batch. `alone`: hide all other sequences from the processor."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process the logits of the announced rows, float32 `[rows, vocab]`."""
        after: object = self._processor.apply(logits)
        if not isinstance(after, torch.Tensor):
            raise TypeError(f"{self.name}.apply returned {type(after).__name__} instead of the logits")
        if after.shape != logits.shape:
            raise ValueError(f"{self.name}.apply returned shape {tuple(after.shape)} for {tuple(logits.shape)}")
        return after.to(logits)

    def restart(self) -> None:
        """Replace the processor by a new instance without state. Raises what its constructor raises."""
        self._processor = self._make()


class RowHost(Host):
    """Hosts a processor of vLLM V1's model. A late sequence stays in the batch, so that the processor keeps its state
    of it."""

    def __init__(self, kind: type[LogitsProcessor], config: VllmConfig, device: torch.device) -> None:
        super().__init__(kind, config, device)
        self._batch = PersistentBatch()
        self._late: list[Sequence] = []
        """Late sequences at the end of the batch. They have no logits in this step."""

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        self._late = [row for row in self._batch.rows if row.is_late]
        self._processor.update_state(self._batch.update([*rows, *self._late]))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._late:
            return super().apply(logits)
        blank = logits.new_zeros(len(self._late), logits.shape[1])
        return super().apply(torch.cat([logits, blank]))[: len(logits)]

    def restart(self) -> None:
        self._batch = PersistentBatch()
        super().restart()


class IndexHost(Host):
    """Hosts a processor of the revised model. Several hosts share `indices`."""

    def __init__(
        self, kind: type[LogitsProcessor], config: VllmConfig, device: torch.device, indices: RequestIndices
    ) -> None:
        super().__init__(kind, config, device)
        self._indices = indices
        self._known: dict[int, Sequence] = {}
        self._mapping: NDArray[np.int64] | None = None

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        mapping = self._indices.assign(rows)
        holders = self._indices.holders
        if alone:
            holders = {index: holders[index] for index in mapping.tolist()}
        for index, sequence in list(self._known.items()):
            if holders.get(index) is not sequence:
                del self._known[index]
                self._processor.remove_request(index)
        for index, sequence in holders.items():
            if index not in self._known:
                self._processor.add_request((sequence.params, len(sequence.data.prompt_token_ids), index))
                self._known[index] = sequence
        same = self._mapping is not None and np.array_equal(mapping, self._mapping)
        self._mapping = mapping
        self._processor.update_state(None if same else mapping, self._indices.token_ids, self._indices.seq_lens)

    def restart(self) -> None:
        self._known = {}
        self._mapping = None
        super().restart()
