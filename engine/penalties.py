"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import torch

from engine.batch import Batch


class Penalties:
    """Token counts of a batch's penalised rows. Valid while the batch stays the same.

    The repetition penalty (arXiv:1909.05858, over prompt and output) comes first: positive logits are divided by it,
    negative ones multiplied. OpenAI's penalties, over the output, follow: frequency once per occurrence, presence once.
    """

    def __init__(self, batch: Batch, logits: torch.Tensor) -> None:
        self.batch = batch
        device, vocab_size = logits.device, logits.shape[1]
        self._sequences = [batch.sequences[row] for row in batch.penalised]
        params = [sequence.params for sequence in self._sequences]
        self._rows = torch.tensor(batch.penalised, device=device)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], device=device)[:, None]
        self._frequency = torch.tensor([p.frequency_penalty for p in params], device=device)[:, None]
        self._presence = torch.tensor([p.presence_penalty for p in params], device=device)[:, None]
        self._counts = torch.zeros(len(params), vocab_size, device=device)
        self._in_prompt = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
        self._seen = [0] * len(params)
        for index, sequence in enumerate(self._sequences):
            self._in_prompt[index, torch.tensor(sequence.data.prompt_token_ids, device=device)] = True

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise `logits`, float32 `[rows, vocab]`, in place."""
        self._count_new()
        picked = logits[self._rows]
        appeared = self._counts > 0
        factor = torch.where(appeared | self._in_prompt, self._repetition, 1.0)
        picked = torch.where(picked > 0, picked / factor, picked * factor)
        picked -= self._frequency * self._counts + self._presence * appeared
        logits[self._rows] = picked

    def _count_new(self) -> None:
        """Count the tokens that were appended since the last call."""
        rows: list[int] = []
        tokens: list[int] = []
        for index, sequence in enumerate(self._sequences):
            fresh = sequence.data.output_token_ids[self._seen[index] :]
            self._seen[index] += len(fresh)
            rows += [index] * len(fresh)
            tokens += fresh
        if rows:
            device = self._counts.device
            where = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
            self._counts.index_put_(where, torch.ones(len(rows), device=device), accumulate=True)
