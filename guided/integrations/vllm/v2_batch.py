"""The batch of vLLM's V2 model runner: the guided request in each slot, and its output tokens.

vLLM fills a slot again without reporting that the previous request has left it, and keeps tokens on the device. New
tokens are copied to the host at each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from guided.integrations.vllm.masker import GuidedRequest, GuidedRow

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState


@dataclass(eq=False, slots=True)
class _Slot:
    """One guided request and its tokens."""

    request: GuidedRequest
    prompt_length: int
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

    def __init__(self, states: LogitsProcRequestState, max_drafts: int = 0) -> None:
        self._states = states
        self._width = 1 + max_drafts
        """Maximum number of tokens that a step adds to an output."""
        self._slots: dict[int, _Slot] = {}
        cuda = torch.device(states.device).type == "cuda"
        self._stream = torch.cuda.Stream(states.device) if cuda else None  # type: ignore[no-untyped-call]

    def put(self, index: int, request: GuidedRequest | None) -> GuidedRequest | None:
        """Fill a slot with `request` (None: a request without a constraint). Returns the previous guided request."""
        previous = self._slots.pop(index, None)
        if request is not None:
            self._slots[index] = _Slot(request, int(self._states.prompt_len.np[index]))
        return previous.request if previous is not None else None

    def begin(self) -> None:
        """Begin a step, before its forward pass: `read` waits only for the work queued on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._states.device))

    def read(self) -> None:
        """Bring the outputs to the state at the beginning of this step."""
        if not self._slots:
            return
        tokens, lengths = self._states.all_token_ids.gpu, self._states.total_len.gpu
        with torch.cuda.stream(self._stream):  # None: the device is the CPU
            starts = [slot.length for slot in self._slots.values()]
            rows, first = torch.tensor([list(self._slots), starts], device=tokens.device)
            columns = (first[:, None] + torch.arange(self._width, device=tokens.device)).clamp_(max=tokens.shape[1] - 1)
            copied = torch.cat((lengths[rows][:, None], tokens[rows[:, None], columns]), 1).tolist()
            for (index, slot), (length, *window) in zip(self._slots.items(), copied, strict=True):
                new = length - slot.length
                if new > len(window):  # the request was preempted, or earlier steps were not read
                    window = tokens[index, slot.length : length].tolist()
                if new < 0:
                    del slot.tokens[max(0, length - slot.prompt_length) :]
                slot.tokens.extend(window[: max(0, new)])

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
        """Return the guided rows of the logits, ordered by slot and then by number of draft tokens.

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

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)
