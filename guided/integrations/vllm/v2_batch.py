"""The batch of vLLM's V2 model runner: the guided request in each slot, and its output tokens.

vLLM fills a slot again without reporting that the previous request has left it, and keeps tokens on the device. New
tokens are copied to the host at each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from guided.integrations.vllm.masker import GuidedRequest, GuidedRow


class RequestStates(Protocol):
    """The part of vLLM's `LogitsProcRequestState` that is read here: int32 tensors (`.gpu`) and arrays (`.np`)."""

    device: torch.device
    all_token_ids: Any
    """`.gpu`: `[slots, max_model_len]`."""
    total_len: Any
    """`.gpu`: `[slots]`: number of prompt and output tokens."""
    prompt_len: Any
    """`.np`: `[slots]`."""
    prefill_len: Any
    """`.np`: `[slots]`: number of tokens that the request entered the slot with."""


@dataclass(eq=False, slots=True)
class Slot:
    """One guided request and its tokens."""

    request: GuidedRequest
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


class V2Batch:
    """Slot index -> the guided request in the slot. Slots of other requests are not in it.

    Args:
        states: vLLM's state of all slots.
        max_drafts: maximum number of draft tokens of a request in one step.
    """

    def __init__(self, states: RequestStates, max_drafts: int = 0) -> None:
        self._states = states
        self._max_drafts = max_drafts
        self._slots: dict[int, Slot] = {}
        self._copies = TokenCopies(states)
        self._copying: list[int] = []
        """Slots with a copy of their tokens under way."""
        self._copy_error: Exception | None = None

    def put(self, index: int, request: GuidedRequest | None) -> GuidedRequest | None:
        """Fill a slot with `request` (None: a request without a constraint). Returns the previous guided request."""
        previous = self._slots.pop(index, None)
        if request is not None:
            prompt_length = int(self._states.prompt_len.np[index])
            prior = int(self._states.prefill_len.np[index]) - prompt_length
            self._slots[index] = Slot(request, prompt_length, prior)
        return previous.request if previous is not None else None

    def begin_copy(self) -> None:
        """Start to copy the tokens of the previous step. An error is raised by `read_copy`."""
        self._copying, self._copy_error = list(self._slots), None
        if not self._copying:
            return
        slots = self._slots.values()
        width = 1 + self._max_drafts + max(slot.prior for slot in slots)
        try:
            self._copies.begin(self._copying, [slot.length for slot in slots], width)
        except Exception as error:
            self._copy_error = error

    def read_copy(self) -> None:
        """Wait for the copy, and bring the outputs to the state at the beginning of this step."""
        if self._copy_error is not None:
            raise self._copy_error
        if not self._copying:
            return
        indices, self._copying = self._copying, []
        for index, (length, *window) in zip(indices, self._copies.read(), strict=True):
            slot = self._slots[index]
            new = length - slot.length
            if new > len(window):  # earlier copies were not read
                window = self._states.all_token_ids.gpu[index, slot.length : length].tolist()
            if new < 0:
                del slot.tokens[max(0, length - slot.prompt_length) :]
            slot.tokens.extend(window[: max(0, new)])
            slot.prior = 0

    def count_absent(self, present: Collection[int], limit: int) -> list[GuidedRequest]:
        """Count the steps of slots that are not in the batch. Returns requests that reach `limit` in this step."""
        reached: list[GuidedRequest] = []
        for index, slot in self._slots.items():
            slot.absent_steps = 0 if index in present else slot.absent_steps + 1
            if slot.absent_steps == limit:
                reached.append(slot.request)
        return reached

    def rows(
        self, slot_of_row: Sequence[int], draft_counts: Sequence[int], input_ids: Sequence[int]
    ) -> list[GuidedRow]:
        """The guided rows of the logits, ordered by slot and then by number of draft tokens.

        Args:
            slot_of_row: slot of each row of the logits.
            draft_counts: for each row, the number of its request's draft tokens before it.
            input_ids: the token that each row was fed: the request's last committed token, then one draft per row. May
                be empty if there are no drafts.
        """
        found: list[tuple[int, GuidedRow]] = []
        for row, (index, drafts) in enumerate(zip(slot_of_row, draft_counts, strict=True)):
            slot = self._slots.get(index)
            if slot is not None:
                tokens = [*slot.tokens, *input_ids[row - drafts + 1 : row + 1]] if drafts else slot.tokens
                found.append((index, GuidedRow(slot.request, row, tokens, drafts)))
        return [row for _, row in sorted(found, key=lambda pair: (pair[0], pair[1].drafts))]

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)


class TokenCopies:
    """Copies new tokens from the device to the host, one copy per step.

    The copy runs on a stream of its own. `begin` is called before the forward pass, and `read` after its launch: the
    host waits for the previous step's tokens while the device works on this one.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._cuda = torch.device(states.device).type == "cuda"
        self._stream = torch.cuda.Stream(states.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copy: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, slots: Sequence[int], starts: Sequence[int], width: int) -> None:
        """Start to copy, for each of `slots`, its length and `width` tokens from position `starts[i]` on."""
        if self._stream is None:
            self._copy = self._gather(slots, starts, width)
            return
        with torch.cuda.device(self._states.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                gathered = self._gather(slots, starts, width)
                self._copy = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                self._copy.copy_(gathered, non_blocking=True)
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(self._stream)

    def _gather(self, slots: Sequence[int], starts: Sequence[int], width: int) -> torch.Tensor:
        """int `[slots, 1 + width]`: the length, then the tokens. Tokens beyond the length are undefined."""
        tokens, lengths = self._states.all_token_ids.gpu, self._states.total_len.gpu
        both = torch.tensor([list(slots), list(starts)], dtype=torch.int64)
        both = both.pin_memory().to(self._states.device, non_blocking=True) if self._cuda else both
        rows, first = both[0], both[1]
        columns = (first[:, None] + torch.arange(width, device=first.device)).clamp_(max=tokens.shape[1] - 1)
        return torch.cat((lengths[rows][:, None], tokens[rows[:, None], columns]), 1)

    def read(self) -> list[list[int]]:
        """Wait for the copy. Returns the length and the tokens of each slot of the last `begin`, in its order."""
        assert self._copy is not None
        if self._done is not None:
            self._done.synchronize()
        copied: list[list[int]] = self._copy.tolist()
        self._copy = None
        return copied
