"""Sampler: logits to tokens, for a whole batch at once.

The order is: bias, penalties and suppressed tokens (`min_tokens`, `ignore_eos`) in `adjust`; then the guided mask,
which is not this file's; then temperature, min_p, top_k, top_p and the draw in `sample`. What `adjust` suppresses
becomes very small but stays finite, and what the mask forbids becomes -inf: where only suppressed tokens are legal,
the mask wins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from engine.penalties import Penalties
from engine.sampling_metadata import SamplingMetadata
from engine.sampling_params import SamplingParams
from engine.sequence import Logprob, Sequence

__all__ = ["SUPPRESSED", "Sampler", "SamplerOutput"]

SUPPRESSED = -1e30
"""The logit of a suppressed token: finite in float32 even when a penalty or the lowest temperature multiplies it."""


@dataclass(slots=True)
class SamplerOutput:
    """One step's tokens. Entry i is row i's; a row that was skipped has a token too, which means nothing."""

    token_ids: list[int]
    broken: list[int] = field(default_factory=list)
    """Rows whose sampled logit is not a finite number: all forbidden, or the model computed none."""
    logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    """By row, where asked for: the sampled token's and the most likely ones'."""


class Sampler:
    """Used as a pair, once a step: `adjust` before the mask, `sample` after it.

    Log-probabilities are of the raw logits: the model's own distribution, before bias, penalties, mask and temperature
    (as vLLM reports them by default).

    Args:
        eos_ids: the model's own stop tokens.
    """

    def __init__(self, eos_ids: Collection[int]) -> None:
        self._eos = sorted(eos_ids)
        self._penalties: Penalties | None = None
        self._raw: torch.Tensor | None = None

    def adjust(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Bias, suppression and penalties, in place. `logits`: float32 `[rows, vocab]`, returned."""
        if metadata.with_logprobs:
            self._raw = logits[metadata.with_logprobs].log_softmax(-1)
        for row in metadata.biased:
            _add_bias(logits[row], metadata.sequences[row])
        if metadata.penalised:
            if self._penalties is None or self._penalties.metadata is not metadata:
                self._penalties = Penalties(metadata, logits.shape[1])
            self._penalties.apply(logits)
        if metadata.with_min_tokens or metadata.without_eos:
            self._suppress(logits, metadata)
        return logits

    def _suppress(self, logits: torch.Tensor, metadata: SamplingMetadata) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        for row in metadata.with_min_tokens:
            sequence = metadata.sequences[row]
            if sequence.num_output_tokens < sequence.params.min_tokens:
                stops = sequence.stop_ids.union(self._eos)
                rows += [row] * len(stops)
                tokens += stops
        for row in metadata.without_eos:
            rows += [row] * len(self._eos)
            tokens += self._eos
        if rows:
            logits[torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)] = SUPPRESSED

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata, skip: Collection[int] = ()) -> SamplerOutput:
        """Draw one token a row.

        Args:
            logits: float32 `[rows, vocab]`, adjusted and masked.
            skip: rows that are not sampled now: their generators stay where they are.
        """
        chosen = logits.argmax(-1)
        if not metadata.is_all_greedy:
            rows = [row for row in sorted(metadata.random + metadata.seeded) if row not in skip]
            if rows:
                picked = logits if len(rows) == len(logits) else logits[rows]
                chosen[rows] = self._draw(picked, [metadata.sequences[row] for row in rows])
        finite = logits.gather(1, chosen[:, None]).isfinite()
        output = SamplerOutput(chosen.tolist())
        if not finite.all():
            output.broken = [row for row in (~finite[:, 0]).nonzero()[:, 0].tolist() if row not in skip]
        if metadata.with_logprobs:
            output.logprobs = self._logprobs(chosen, metadata)
        return output

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """One random token a row by the inverse of the distribution function: one uniform number each."""
        device = logits.device
        params = [sequence.params for sequence in sequences]
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        logits = logits / temperatures[:, None]
        if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
            logits = _truncate(logits, params)
        uniforms = torch.tensor([s.uniforms.next() for s in sequences], dtype=torch.float64, device=device)
        cumulated = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        # A hair less than the total, so that rounding never leads past the last token that has a probability.
        targets = uniforms[:, None] * (cumulated[:, -1:] * (1 - 2**-40))
        return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)

    def _logprobs(self, chosen: torch.Tensor, metadata: SamplingMetadata) -> dict[int, dict[int, Logprob]]:
        raw, rows = self._raw, metadata.with_logprobs
        assert raw is not None, "adjust comes before sample"
        self._raw = None
        counts = [metadata.sequences[row].params.logprobs or 0 for row in rows]
        own_ids = chosen[rows]
        own = raw.gather(1, own_ids[:, None])
        ranks = (raw > own).sum(-1) + 1
        best = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
        found: dict[int, dict[int, Logprob]] = {}
        columns = (own_ids.tolist(), own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
        for row, count, token, value, rank, ids, values in zip(rows, counts, *columns, strict=True):
            entries = {token: Logprob(value, rank)}
            for place, (other, logprob) in enumerate(zip(ids[:count], values[:count], strict=True), start=1):
                entries.setdefault(other, Logprob(logprob, place))
            found[row] = entries
        return found


def _add_bias(logits: torch.Tensor, sequence: Sequence) -> None:
    bias = sequence.params.logit_bias or {}
    tokens = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    logits[tokens] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)


def _truncate(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Forbid what min_p, top_k and top_p leave out; `logits` `[rows, vocab]` after temperature."""
    device, vocab = logits.device, logits.shape[1]
    if any(p.min_p > 0.0 for p in params):
        floors = torch.tensor([p.min_p for p in params], device=device).log()[:, None]
        logits = logits.masked_fill(logits < logits.max(-1, keepdim=True).values + floors, float("-inf"))
    if all(p.top_k <= 0 and p.top_p >= 1.0 for p in params):
        return logits
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    # As many of the best as anybody needs; all of them, sorted, for a row that has top_p only.
    values, ids = logits.topk(max(ks), dim=-1)
    beyond = torch.arange(values.shape[1], device=device) >= torch.tensor(ks, device=device)[:, None]
    values = values.masked_fill(beyond, float("-inf"))
    if any(p.top_p < 1.0 for p in params):
        mass = values.softmax(-1)
        before = mass.cumsum(-1) - mass
        limits = torch.tensor([p.top_p for p in params], device=device)[:, None]
        # A token stays while those before it have less than top_p together: the first always does.
        values = values.masked_fill((before >= limits) & (limits < 1.0), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
