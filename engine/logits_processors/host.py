"""Hosts: one processor each, of either programming model, behind one interface; who has raised is made anew."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits_processors.interface import LogitsProcessor
from engine.logits_processors.persistent_batch import PersistentBatch
from engine.logits_processors.revised import RevisedLogitsProcessor
from engine.logits_processors.slots import Slots
from engine.sequence import Sequence

__all__ = ["Host", "IndexHost", "RowHost"]


class Host(Protocol):
    """What the engine needs of a processor, whichever model it is written for. Whatever the processor raises comes out;
    the instance is not to be trusted from then on: `restart`."""

    name: str
    argmax_invariant: bool

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        """Tell it of the next batch. `alone`: of nobody else, so that nobody else's parameters are looked at."""

    def begin_parked(self, rows: Rows[Sequence]) -> None:
        """Like `begin`, where the rows are some that were parked, and those of the last batch go on afterwards."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Have it change the logits of the rows of the last `begin`, float32 `[rows, vocab]`."""

    def restart(self) -> None:
        """Make the processor anew; it knows of nobody. Raises what its constructor raises."""


def checked(after: object, before: torch.Tensor, name: str) -> torch.Tensor:
    """What `apply` returned, if it can be logits."""
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"{name}.apply returned {type(after).__name__}; it returns the logits")
    if after.shape != before.shape:
        raise ValueError(f"{name}.apply returned shape {tuple(after.shape)} for {tuple(before.shape)}")
    return after.to(before)


class RowHost:
    """Hosts a processor of vLLM V1's model.

    Args:
        make: a new processor.
        capacity: rows that a batch has at the most.
    """

    def __init__(self, name: str, make: Callable[[], LogitsProcessor], capacity: int) -> None:
        self.name = name
        self._make = make
        self._capacity = capacity
        self._skipped = 0
        """Rows at the beginning of the batch that are not in the logits: they stand by while others are sampled."""
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
        # Those of the batch go on afterwards: removing them now would cost a processor what it knows of them.
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
    """Hosts a processor of the revised model. `slots` may be shared by several."""

    def __init__(self, name: str, make: Callable[[], RevisedLogitsProcessor], slots: Slots) -> None:
        self.name = name
        self._make = make
        self._slots = slots
        self._known: dict[int, Sequence] = {}
        self._mapping: NDArray[np.int64] | None = None
        self._processor = make()
        self.argmax_invariant = self._processor.is_argmax_invariant()

    def begin(self, rows: Rows[Sequence], *, alone: bool = False) -> None:
        mapping = self._slots.take(rows)
        holders = self._slots.holders
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
        self._processor.update_state(None if same else mapping, self._slots.token_ids, self._slots.seq_lens)

    def begin_parked(self, rows: Rows[Sequence]) -> None:
        self.begin(rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return checked(self._processor.apply(logits), logits, self.name)

    def restart(self) -> None:
        self._known = {}
        self._mapping = None
        self._processor = self._make()
