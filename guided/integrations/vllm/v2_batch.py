"""The batch of vLLM's V2 model runner: the guided request in each slot, and its output tokens.

vLLM fills a slot again without reporting that the previous request has left it, and keeps tokens on the device.
`TokenCopies` copies the new tokens to the host at each step, and `V2Batch` adds them to the outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

__all__ = ["RequestTokens", "Slot", "TokenCopies", "V2Batch", "V2Row"]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Slot(Generic[T]):
    """One guided request and its tokens."""

    request: T
    prompt_length: int
    prior: int
    """Output tokens that the request entered the slot with (after a preemption) and that are not copied yet."""
    tokens: list[int] = field(default_factory=list)
    """Committed output tokens that have been copied."""
    absent_steps: int = 0
    """Consecutive steps in which the request was not in the batch."""

    @property
    def length(self) -> int:
        """Number of prompt tokens and copied output tokens."""
        return self.prompt_length + len(self.tokens)


class V2Row(NamedTuple):
    """One row of the logits."""

    slot: int
    logits_row: int
    draft_count: int
    """Number of the request's draft tokens before this row."""


class V2Batch(Generic[T]):
    """Slot index -> the guided request in the slot. Slots of other requests are not in it."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot[T]] = {}

    def put(self, index: int, request: T | None, prompt_length: int, prior: int) -> T | None:
        """Fill a slot with `request` (None: a request without a constraint). Returns the previous guided request."""
        previous = self._slots.pop(index, None)
        if request is not None:
            self._slots[index] = Slot(request, prompt_length, prior)
        return previous.request if previous is not None else None

    def add_tokens(self, lengths: Mapping[int, int], windows: Mapping[int, Sequence[int]]) -> list[int]:
        """Bring the outputs to the state at the beginning of this step.

        Args:
            lengths: slot index -> number of prompt and output tokens.
            windows: slot index -> copied tokens from position `Slot.length` on. A window can be longer than the new
                tokens, or too short.

        Returns:
            Slots with a window that was too short. Their outputs are unchanged.
        """
        short: list[int] = []
        for index, length in lengths.items():
            slot = self._slots[index]
            new = length - slot.length
            if new > len(windows[index]):
                short.append(index)
                continue
            if new < 0:
                del slot.tokens[max(0, length - slot.prompt_length) :]
            slot.tokens.extend(windows[index][: max(0, new)])
            slot.prior = 0
        return short

    def count_absent(self, present: Collection[int], limit: int) -> list[T]:
        """Count the steps of slots that are not in the batch. Returns requests that reach `limit` in this step."""
        reached: list[T] = []
        for index, slot in self._slots.items():
            slot.absent_steps = 0 if index in present else slot.absent_steps + 1
            if slot.absent_steps == limit:
                reached.append(slot.request)
        return reached

    def rows(self, slot_of_row: Sequence[int], draft_counts: Sequence[int]) -> list[V2Row]:
        """The guided rows of the logits, ordered by slot and then by number of draft tokens.

        Args:
            slot_of_row: slot of each row of the logits.
            draft_counts: for each row, the number of its request's draft tokens before it.
        """
        found = [
            V2Row(slot, row, drafts)
            for row, (slot, drafts) in enumerate(zip(slot_of_row, draft_counts, strict=True))
            if slot in self._slots
        ]
        return sorted(found, key=lambda row: (row.slot, row.draft_count))

    def __getitem__(self, index: int) -> Slot[T]:
        return self._slots[index]

    def __contains__(self, index: object) -> bool:
        return index in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


class RequestTokens(Protocol):
    """The part of vLLM's `LogitsProcRequestState` that `TokenCopies` reads."""

    device: torch.device
    all_token_ids: Any
    """`.gpu`: int32 `[slots, max_model_len]`."""
    total_len: Any
    """`.gpu`: int32 `[slots]`."""


class TokenCopies:
    """Copies new tokens from the device to the host, one copy per step.

    The copy runs on a stream of its own. `begin` is called before the forward pass and waits only for the previous
    step. `read` is called after the forward pass was launched, so the host waits for the previous step's tokens while
    the device works on this step. A copy that was not read is replaced by the next one.
    """

    def __init__(self, state: RequestTokens) -> None:
        self._state = state
        self._cuda = torch.device(state.device).type == "cuda"
        self._stream = torch.cuda.Stream(state.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copy: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, slots: Sequence[int], starts: Sequence[int], width: int) -> None:
        """Start to copy, for each of `slots`, its length and `width` tokens from position `starts[i]` on."""
        if self._stream is None:
            self._copy = self._gather(slots, starts, width)
            return
        with torch.cuda.device(self._state.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                gathered = self._gather(slots, starts, width)
                self._copy = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                self._copy.copy_(gathered, non_blocking=True)
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(self._stream)

    def _gather(self, slots: Sequence[int], starts: Sequence[int], width: int) -> torch.Tensor:
        """int `[slots, 1 + width]`: the length, then the tokens. Tokens beyond the length are undefined."""
        tokens, lengths = self._state.all_token_ids.gpu, self._state.total_len.gpu
        both = torch.tensor([list(slots), list(starts)], dtype=torch.int64)
        both = both.pin_memory().to(self._state.device, non_blocking=True) if self._cuda else both
        rows, first = both[0], both[1]
        columns = (first[:, None] + torch.arange(width, device=first.device)).clamp_(max=tokens.shape[1] - 1)
        return torch.cat((lengths[rows][:, None], tokens[rows[:, None], columns]), 1)

    def read(self) -> tuple[list[int], list[list[int]]]:
        """Wait for the copy. Returns lengths and tokens of the slots of the last `begin`, in its order."""
        assert self._copy is not None
        if self._done is not None:
            self._done.synchronize()
        copied: list[list[int]] = self._copy.tolist()
        self._copy = None
        return [row[0] for row in copied], [row[1:] for row in copied]
