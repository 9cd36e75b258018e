"""What a request adds to its logits before the mask: bias, penalties, and suppressed stop tokens (`min_tokens`)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from engine.batch import Batch

SUPPRESSED = -1e30
"""The logit of a suppressed token: finite in float32 even when a penalty or the lowest temperature multiplies it. Where
a constraint allows no other token, its mask wins."""


class Penalties:
    """The biased, penalised and short rows of a batch as tensors. Valid while the batch stays the same. All methods
    change logits, float32 `[rows, vocab]`, in place. `stop_token_ids` are the model's own."""

    def __init__(self, batch: Batch, logits: torch.Tensor, stop_token_ids: Collection[int]) -> None:
        self.batch = batch
        self._device = device = logits.device
        bias = [(row, *one) for row in batch.biased for one in (batch.sequences[row].params.logit_bias or {}).items()]
        self._bias = torch.tensor([value for *_, value in bias], dtype=torch.float32, device=device)
        self._biased = _places([(row, token) for row, token, _ in bias], device)
        self._short = [(row, batch.sequences[row]) for row in batch.with_min_tokens]
        self._stops = {row: sorted({*stop_token_ids, *one.params.stop_token_ids}) for row, one in self._short}
        self._suppressed = _places([(row, token) for row, tokens in self._stops.items() for token in tokens], device)
        self._sequences = [batch.sequences[row] for row in batch.penalised]
        params = [sequence.params for sequence in self._sequences]
        self._rows = torch.tensor(batch.penalised, device=device)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], device=device)[:, None]
        self._frequency = torch.tensor([p.frequency_penalty for p in params], device=device)[:, None]
        self._presence = torch.tensor([p.presence_penalty for p in params], device=device)[:, None]
        self._counts = torch.zeros(len(params), logits.shape[1], device=device)
        self._in_prompt = torch.zeros(len(params), logits.shape[1], dtype=torch.bool, device=device)
        self._seen = [0] * len(params)
        for index, sequence in enumerate(self._sequences):
            self._in_prompt[index, torch.tensor(sequence.data.prompt_token_ids, device=device)] = True

    def add_bias(self, logits: torch.Tensor) -> None:
        """Add `logit_bias`."""
        if self.batch.biased:
            logits[self._biased] += self._bias

    def suppress_stop_tokens(self, logits: torch.Tensor) -> None:
        """Suppress stop tokens in rows with fewer than `min_tokens` output tokens."""
        short = [(row, one) for row, one in self._short if one.num_output_tokens < one.params.min_tokens]
        if len(short) < len(self._short):
            self._short = short
            self._suppressed = _places([(row, token) for row, _ in short for token in self._stops[row]], self._device)
        if short:
            logits[self._suppressed] = SUPPRESSED

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise tokens that have appeared. The repetition penalty (arXiv:1909.05858) comes first, then OpenAI's:
        frequency once per occurrence, presence once."""
        if not self.batch.penalised:
            return
        fresh: list[tuple[int, int]] = []
        for index, sequence in enumerate(self._sequences):
            new = sequence.data.output_token_ids[self._seen[index] :]
            self._seen[index] += len(new)
            fresh += [(index, token) for token in new]
        if fresh:
            self._counts.index_put_(_places(fresh, self._device), torch.ones((), device=self._device), accumulate=True)
        picked = logits[self._rows]
        appeared = self._counts > 0
        factor = torch.where(appeared | self._in_prompt, self._repetition, 1.0)
        picked = torch.where(picked > 0, picked / factor, picked * factor)
        picked -= self._frequency * self._counts + self._presence * appeared
        logits[self._rows] = picked


def _places(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) pairs as two index tensors."""
    rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    return rows, tokens
