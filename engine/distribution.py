"""Random sampling: temperature, min_p, top_k, top_p and the draw."""

from __future__ import annotations

import torch

from engine.batch import Batch


class Distribution:
    """The random rows of a batch and their parameters as tensors. Valid while the batch stays the same."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.batch = batch
        self.rows = batch.random
        self.index = torch.tensor(self.rows, device=device)
        params = [batch.sequences[row].params for row in self.rows]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._temperatures = column([p.temperature for p in params])
        self._min_p = column([p.min_p for p in params]).log_() if any(p.min_p for p in params) else None
        self._ks = [p.top_k for p in params]
        self._top_p = column([p.top_p for p in params]) if any(p.top_p < 1.0 for p in params) else None

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Divide `logits`, float32 `[len(rows), vocab]`, by the temperatures, and set the tokens to -inf that are less
        than `min_p` times as likely as the most likely one. Returns a new tensor."""
        scaled = logits / self._temperatures
        if self._min_p is not None:
            scaled.masked_fill_(scaled < scaled.max(-1, keepdim=True).values + self._min_p, -torch.inf)
        return scaled

    def scaled_whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale the random rows of a whole batch's logits. Returns a new tensor."""
        if len(self.rows) == len(logits):
            return self.scaled(logits)
        return logits.index_copy(0, self.index, self.scaled(logits[self.index]))

    def draw(self, logits: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
        """Draw one token per row, int64 `[rows]`: invert the cumulative distribution of scaled logits, `[rows, vocab]`,
        at `uniforms`, one number in [0, 1) per row."""
        logits = self._truncated(logits)
        cumulated = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        # Slightly less than the total, so that rounding cannot lead past the last token with a probability.
        targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
        targets = targets * (cumulated[:, -1:] * (1 - 2**-40))
        return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)

    def _truncated(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the tokens that top_k and top_p exclude to -inf."""
        if self._top_p is None and all(k <= 0 for k in self._ks):
            return logits
        vocab = logits.shape[1]
        ks = [k if 0 < k < vocab else vocab for k in self._ks]
        # The largest top_k of the batch. A row with top_p alone needs all tokens, sorted.
        values, ids = logits.topk(max(ks), dim=-1)
        beyond = torch.arange(values.shape[1], device=logits.device) >= torch.tensor(ks, device=logits.device)[:, None]
        values = values.masked_fill(beyond, float("-inf"))
        if self._top_p is not None:
            mass = values.softmax(-1)
            before = mass.cumsum(-1) - mass
            # A token stays while the tokens before it sum to less than top_p. The first always stays.
            values = values.masked_fill((before >= self._top_p) & (self._top_p < 1.0), float("-inf"))
        return torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
