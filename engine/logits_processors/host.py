"""Hosts: one interface to logits processors of both programming models. A processor that has raised is replaced."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits_processors.indices import RequestIndices
from engine.logits_processors.interface import LogitsProcessor
from engine.logits_processors.persistent_batch import PersistentBatch
from engine.logits_processors.revised import RevisedLogitsProcessor
from engine.sequence import Sequence

__all__ = ["Host", "IndexHost", "RowHost"]


class Host(Protocol):
    """Runs one logits processor. Exceptions of the processor pass through; call `restart` after one."""

    name: str
    argmax_invariant: bool

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        """Announce the next batch. `alone`: hide all other sequences from the processor."""

    def begin_parked(self, rows: Rows[Sequence]) -> None:
        """Announce a batch of parked rows. The rows of the last batch continue afterwards."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process the logits of the announced rows, float32 `[rows, vocab]`."""

    def restart(self) -> None:
        """Replace the processor by a new instance without state. Raises what its constructor raises."""


def checked(after: object, before: torch.Tensor, name: str) -> torch.Tensor:
    """Check the return value of `apply`."""
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"{name}.apply returned {type(after).__name__} instead of the logits")
    if after.shape != before.shape:
        raise ValueError(f"{name}.apply returned shape {tuple(after.shape)} for {tuple(before.shape)}")
    return after.to(before)


class RowHost:
    """Hosts a processor of vLLM V1's model.

    Args:
        make: creates the processor.
        capacity: maximum number of rows in a batch.
    """

    def __init__(self, name: str, make: Callable[[], LogitsProcessor], capacity: int) -> None:
        self.name = name
        self._make = make
        self._capacity = capacity
        self._skipped = 0
        """Rows at the beginning of the batch that have no logits: they wait while parked rows are sampled."""
        self._batch = PersistentBatch()
        self._processor = make()
        self.argmax_invariant = self._processor.is_argmax_invariant()

    @property
    def is_empty(self) -> bool:
        return not self._batch.rows

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        self._skipped = 0
        self._processor.update_state(self._batch.update(rows))

    def begin_parked(self, rows: Rows[Sequence]) -> None:
        coming = set(rows)
        others = [sequence for sequence in self._batch.rows if sequence not in coming]
        # Rows of the last batch stay, because the processor would lose its state of them.
        staying = [sequence for sequence in others if not sequence.status.is_finished]
        del staying[max(0, self._capacity - len(rows)) :]
        self._skipped = len(staying)
        self._processor.update_state(self._batch.update([*staying, *rows]))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._skipped:
            return checked(self._processor.apply(logits), logits, self.name)
        blank = logits.new_zeros(self._skipped, logits.shape[1])
        whole = torch.cat([blank, logits])
        return checked(self._processor.apply(whole), whole, self.name)[self._skipped :]

    def restart(self) -> None:
        self._batch = PersistentBatch()
        self._processor = self._make()


class IndexHost:
    """Hosts a processor of the revised model. Several hosts can share `indices`."""

    def __init__(self, name: str, make: Callable[[], RevisedLogitsProcessor], indices: RequestIndices) -> None:
        self.name = name
        self._make = make
        self._indices = indices
        self._known: dict[int, Sequence] = {}
        self._mapping: NDArray[np.int64] | None = None
        self._processor = make()
        self.argmax_invariant = self._processor.is_argmax_invariant()

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
                self._processor.add_request(index, sequence.params, len(sequence.data.prompt_token_ids))
                self._known[index] = sequence
        same = self._mapping is not None and np.array_equal(mapping, self._mapping)
        self._mapping = mapping
        self._processor.update_state(None if same else mapping, self._indices.token_ids, self._indices.seq_lens)

    def begin_parked(self, rows: Rows[Sequence]) -> None:
        self.begin(rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return checked(self._processor.apply(logits), logits, self.name)

    def restart(self) -> None:
        self._known = {}
        self._mapping = None
        self._processor = self._make()
