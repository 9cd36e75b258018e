"""Distribution: draws tokens after temperature, min_p, top_k and top_p."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.step.scheduler import Batch

_BLOCK = 1024
"""Number of tokens of which the probabilities are summed, to find where a random number
lies."""
_FEW = 1024
"""Number of the most likely tokens that are sorted for top_p. All are, if their
probabilities do not suffice."""


class Distribution:
    """The random rows of a batch and their parameters as tensors."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.rows = batch.random
        self.index = torch.tensor(self.rows).to(device, non_blocking=True)
        params = [batch.sequences[row].params for row in self.rows]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32)[:, None].to(
                device, non_blocking=True
            )

        self._temperatures = column([p.temperature for p in params])
        self._min_p = (
            column([p.min_p for p in params]).log_()
            if any(p.min_p for p in params)
            else None
        )
        cut = [place for place, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
        self._cut = torch.tensor(cut).to(device, non_blocking=True)
        """Places of the rows with top_k or top_p."""
        self._ks = [params[place].top_k for place in cut]
        self._limits = column([k if k > 0 else math.inf for k in self._ks])
        self._top_p = column([params[place].top_p for place in cut])

    def scaled(self, logits: Tensor) -> Tensor:
        """Divide `logits`, float32 `[len(rows), vocab]`, by the temperatures, and set
        the tokens to -inf that are less than `min_p` times as likely as the most likely
        one. Returns a new tensor."""
        scaled = logits / self._temperatures
        if self._min_p is not None:
            scaled.masked_fill_(
                scaled < scaled.max(-1, keepdim=True).values + self._min_p, -torch.inf
            )
        return scaled

    def draw(self, logits: Tensor, uniforms: list[float]) -> Tensor:
        """Draw one token per row, int64 `[rows]`: invert the cumulative distribution of
        scaled logits, `[rows, vocab]`, at `uniforms`, one number in [0, 1) per row.
        What top_k and top_p exclude becomes -inf."""
        shares = torch.tensor(uniforms, dtype=torch.float64)
        if logits.is_cuda:  # a copy from pinned memory does not wait for the device
            shares = shares.pin_memory()
        shares = shares.to(logits.device, non_blocking=logits.is_cuda)
        if self._ks:
            values, ids = self._kept(logits[self._cut], _FEW)
            logits.index_fill_(0, self._cut, -torch.inf)
            logits[self._cut[:, None], ids] = values
        return _invert(logits.softmax(-1), shares)

    def _kept(self, logits: Tensor, few: int) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of the rows with top_k or top_p, `[rows,
        count]`: their logits, -inf where they are excluded, and ids. In rows without
        top_k the best `few` are tried first."""
        vocab = logits.shape[1]
        count = min(vocab, max(self._ks) if min(self._ks) > 0 else max(few, *self._ks))
        values, ids = logits.topk(count, dim=-1)
        values = values.masked_fill(
            torch.arange(count, device=logits.device) >= self._limits, -torch.inf
        )
        has_no_k = self._limits.isinf()
        total = torch.where(
            has_no_k,
            logits.logsumexp(-1, keepdim=True),
            values.logsumexp(-1, keepdim=True),
        )
        mass = (values - total).exp()
        cumulated = mass.cumsum(-1)
        if (
            min(self._ks) <= 0
            and count < vocab
            and (has_no_k & (cumulated[:, -1:] < self._top_p)).any()
        ):
            return self._kept(logits, vocab)
        before = cumulated - mass
        # A token stays while the tokens before it sum to less than top_p. The first
        # always stays.
        return values.masked_fill_(
            (before > 0) & (before >= self._top_p) & (self._top_p < 1.0), -torch.inf
        ), ids


def _invert(weights: Tensor, shares: Tensor) -> Tensor:
    """Return the column of each row at which its cumulated weights exceed a share of
    their sum, int64 `[rows]`.

    Only the sums of blocks, and the weights of one block, are cumulated: in float64,
    which is slow on most GPUs.

    Args:
        weights: float32 `[rows, columns]`, not negative.
        shares: float64 `[rows]`, in [0, 1).
    """
    rows, columns = weights.shape
    if columns % _BLOCK:
        weights = F.pad(weights, (0, -columns % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    block, rest = _search(blocks.sum(-1), shares[:, None])
    place, _ = _search(blocks.take_along_dim(block[:, :, None], 1)[:, 0], rest)
    return (block * _BLOCK + place)[:, 0].clamp_(max=columns - 1)


def _search(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column in which a share of each row's sum lies, int64 `[rows, 1]`, and
    the share within its weight."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    # Slightly less than the sum, so that rounding cannot lead past the last column with
    # a weight.
    targets = shares.clamp(0.0, 1 - 2**-40) * cumulated[:, -1:]
    column = torch.searchsorted(cumulated, targets, right=True).clamp_(
        max=weights.shape[1] - 1
    )
    weight = weights.gather(1, column)
    return column, (targets - cumulated.gather(1, column) + weight) / weight
