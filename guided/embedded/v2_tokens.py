"""Copies of what vLLM's V2 runner keeps on the device: the new tokens of some slots, one copy a step.

It is begun before the forward pass, on a stream of its own that waits for the step before and not for this one's
forward pass, and is read after the forward pass was launched: the host waits for the last step's tokens while the
device works on this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["RequestTokens", "TokenCopies"]


class RequestTokens(Protocol):
    """What is read of vLLM's `LogitsProcRequestState`."""

    device: torch.device
    all_token_ids: Any
    """`.gpu`: int32 `[slots, max_model_len]`."""
    total_len: Any
    """`.gpu`: int32 `[slots]`."""


class TokenCopies:
    """One copy at a time: `begin`, then `read`; a later `begin` takes the place of one that was not read."""

    def __init__(self, state: RequestTokens) -> None:
        self._state = state
        self._cuda = torch.device(state.device).type == "cuda"
        self._stream = torch.cuda.Stream(state.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copy: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, slots: Sequence[int], starts: Sequence[int], width: int) -> None:
        """Copy, for each of `slots`, its length, and `width` tokens from position `starts[i]` on."""
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
        """`[slots, 1 + width]`: lengths, and tokens; what is beyond a slot's length is of no meaning."""
        tokens, lengths = self._state.all_token_ids.gpu, self._state.total_len.gpu
        both = torch.tensor([list(slots), list(starts)], dtype=torch.int64)
        both = both.pin_memory().to(self._state.device, non_blocking=True) if self._cuda else both
        rows, first = both[0], both[1]
        columns = (first[:, None] + torch.arange(width, device=first.device)).clamp_(max=tokens.shape[1] - 1)
        return torch.cat((lengths[rows][:, None], tokens[rows[:, None], columns]), 1)

    def read(self) -> tuple[list[int], list[list[int]]]:
        """Lengths and tokens of the slots that the last `begin` named, in its order. Waits for the copy."""
        assert self._copy is not None
        if self._done is not None:
            self._done.synchronize()
        copied: list[list[int]] = self._copy.tolist()
        self._copy = None
        return [row[0] for row in copied], [row[1:] for row in copied]
