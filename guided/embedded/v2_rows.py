"""Who is in which slot of vLLM's V2 runner, and what their outputs are, as far as the host knows.

A slot is filled again without a word about who was there before, and tokens live on the device: every step their new
ones are copied (`guided.embedded.v2_tokens`) and taken over here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Row", "Slot", "V2Rows", "rows_of_step"]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Slot(Generic[T]):
    """One guided request and its tokens."""

    request: T
    prompt_length: int
    prior: int
    """Output tokens that it came with (it was preempted), which the host hasn't seen yet."""
    tokens: list[int] = field(default_factory=list)
    """All committed output tokens that are known here."""
    absent: int = 0
    """Steps in a row in which it was not in the batch."""

    @property
    def length(self) -> int:
        """Of prompt and known output together."""
        return self.prompt_length + len(self.tokens)


class Row(NamedTuple):
    """One row of the logits."""

    slot: int
    logits_row: int
    offset: int
    """How many draft tokens come before it."""


class V2Rows(Generic[T]):
    """Slot index -> the guided request in it."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot[T]] = {}

    def put(self, index: int, request: T | None, prompt_length: int, prior: int) -> T | None:
        """A slot is filled: with `request`, or (None) with another's. Returns who was there until now."""
        before = self._slots.pop(index, None)
        if request is not None:
            self._slots[index] = Slot(request, prompt_length, prior)
        return before.request if before is not None else None

    def take_over(self, totals: Mapping[int, int], windows: Mapping[int, Sequence[int]]) -> list[int]:
        """Take over what was copied of this step's beginning.

        Args:
            totals: slot index -> length of prompt and output together.
            windows: slot index -> the tokens from `Slot.length` on; more than there are, or too few.

        Returns:
            Slots of whose tokens too few were copied; nothing was taken over for them.
        """
        short: list[int] = []
        for index, total in totals.items():
            slot = self._slots[index]
            fresh = total - slot.length
            if fresh > len(windows[index]):
                short.append(index)
                continue
            if fresh < 0:
                del slot.tokens[max(0, total - slot.prompt_length) :]
            slot.tokens.extend(windows[index][: max(0, fresh)])
            slot.prior = 0
        return short

    def absent(self, present: Collection[int], patience: int) -> list[T]:
        """Count who isn't in the batch; those who weren't for `patience` steps in a row, just now."""
        tired: list[T] = []
        for index, slot in self._slots.items():
            slot.absent = 0 if index in present else slot.absent + 1
            if slot.absent == patience:
                tired.append(slot.request)
        return tired

    def __getitem__(self, index: int) -> Slot[T]:
        return self._slots[index]

    def __contains__(self, index: object) -> bool:
        return index in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def rows_of_step(slots: V2Rows[T], slot_of_row: Sequence[int], offset_of_row: Sequence[int]) -> list[Row]:
    """The guided rows of the logits, a request's in the order of its draft tokens.

    Args:
        slot_of_row: of each row of the logits.
        offset_of_row: its place among the rows of its request.
    """
    found = [
        Row(slot, row, offset)
        for row, (slot, offset) in enumerate(zip(slot_of_row, offset_of_row, strict=True))
        if slot in slots
    ]
    return sorted(found, key=lambda row: (row.slot, row.offset))
