"""Sampler: logits to tokens, for a whole batch at once.

The order is: bias, penalties and suppressed tokens (`min_tokens`, `ignore_eos`) in `adjust`; then the guided mask,
which is not this file's; then temperature, min_p, top_k, top_p and the draw in `sample`. What `adjust` suppresses
becomes very small but stays finite, and what the mask forbids becomes -inf: where only suppressed tokens are legal,
the mask wins.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from engine.distribution import Distribution
from engine.penalties import Penalties
from engine.sampling_metadata import SamplingMetadata
from engine.sequence import Logprob, Parked, Sequence

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
        self._eos_ids: torch.Tensor | None = None
        self._penalties: Penalties | None = None
        self._distribution: Distribution | None = None
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
        if metadata.without_eos:
            if self._eos_ids is None:
                self._eos_ids = torch.tensor(self._eos, device=logits.device)
            if len(metadata.without_eos) == len(logits):
                logits.index_fill_(1, self._eos_ids, SUPPRESSED)
            else:
                rows = torch.tensor(metadata.without_eos, device=logits.device)
                logits[rows[:, None], self._eos_ids] = SUPPRESSED
        for row in metadata.with_min_tokens:
            sequence = metadata.sequences[row]
            if sequence.num_output_tokens < sequence.params.min_tokens:
                logits[row, torch.tensor([*sequence.stop_ids, *self._eos], device=logits.device)] = SUPPRESSED

    def park(self, logits: torch.Tensor, row: int, metadata: SamplingMetadata) -> Parked:
        """Between `adjust` and `sample`: what `recall` needs to sample this row another time."""
        raw = None
        if self._raw is not None and row in metadata.with_logprobs:
            raw = self._raw[metadata.with_logprobs.index(row)].clone()
        return Parked(logits[row].clone(), raw, time.monotonic())

    def recall(self, metadata: SamplingMetadata) -> torch.Tensor:
        """In the place of `adjust`, where all rows are parked: their logits, float32 `[rows, vocab]`, a copy."""
        parked = [sequence.parked for sequence in metadata.sequences]
        raw = [one.logprobs for one in parked if one is not None and one.logprobs is not None]
        self._raw = torch.stack(raw) if raw else None
        return torch.stack([one.logits for one in parked if one is not None])

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata, skip: Collection[int] = ()) -> SamplerOutput:
        """Draw one token a row.

        Args:
            logits: float32 `[rows, vocab]`, adjusted and masked.
            skip: rows that are not sampled now: their generators stay where they are.
        """
        best, chosen = logits.max(-1)
        if not metadata.is_all_greedy:
            best, chosen = self._draw(logits, chosen, metadata, skip)
        output = SamplerOutput(chosen.tolist())
        finite = best.isfinite()
        if not finite.all():
            output.broken = [row for row in (~finite).nonzero()[:, 0].tolist() if row not in skip]
        if metadata.with_logprobs:
            output.logprobs = self._logprobs(chosen, metadata)
        return output

    def _draw(
        self, logits: torch.Tensor, greedy: torch.Tensor, metadata: SamplingMetadata, skip: Collection[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen tokens' logits, and the tokens: random where the row is random, `greedy` elsewhere."""
        plan = self._distribution
        if plan is None or plan.metadata is not metadata:
            plan = self._distribution = Distribution(metadata)
        sequences = metadata.sequences
        uniforms = [0.5 if row in skip else sequences[row].uniforms.next() for row in plan.rows]
        if len(plan.rows) == len(logits):
            chosen = plan.draw(logits, uniforms)
        else:
            chosen = greedy.index_copy(0, plan.index, plan.draw(logits[plan.index], uniforms))
        return logits.gather(1, chosen[:, None])[:, 0], chosen

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
