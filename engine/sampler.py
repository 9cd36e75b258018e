"""Sampler: samples tokens from logits, for a whole batch at once.

`adjust` applies bias, custom logits processors, penalties and suppressed tokens (`min_tokens`). Then the engine applies
the mask. `sample` applies temperature, min_p, argmax-invariant custom processors, top_k and top_p, and draws.
Suppressed tokens get a very small but finite logit, and the mask sets -inf: where only these are legal, the mask wins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import Batch
from engine.distribution import Distribution
from engine.logits_processors.processors import LogitsProcessorFailed, LogitsProcessors
from engine.logprobs import TokenLogprobs
from engine.penalties import Penalties
from engine.sampling_params import GREEDY_BELOW
from guided.sequence import SequenceOutput


@dataclass(slots=True)
class SamplerOutput:
    """One step's tokens. Entry i is of row i. The entry of a skipped row is meaningless."""

    token_ids: list[int]
    skipped: frozenset[int] = frozenset()
    """Rows that were not sampled: their mask is late, or their mask or a logits processor has failed."""
    broken: list[int] = field(default_factory=list)
    """Rows with a sampled logit that is not finite: every token is forbidden, or the model computed NaN."""
    failed: dict[int, LogitsProcessorFailed] = field(default_factory=dict)
    """Rows on which a custom logits processor raised, in `adjust` or later."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, if requested: those of the sampled token and of the most likely tokens."""
    allowed: dict[int, int] = field(default_factory=dict)
    """By row with `mask_details`: the number of tokens that could be sampled."""
    beam_logprobs: torch.Tensor | None = None
    """float32 `[len(batch.beams), vocab]`: of the adjusted logits, before the mask."""
    beam_scores: torch.Tensor | None = None
    """The same, -inf where the mask forbids."""

    def sample_of(self, row: int, seq_id: int) -> SequenceOutput:
        """Return the token of a row, which continues sequence `seq_id`."""
        return SequenceOutput(seq_id, self.token_ids[row], self.logprobs.get(row, {}))


class Sampler:
    """Call once per step: `begin` before the forward pass, `adjust` before the mask, `sample` after it.

    Log-probabilities are those of the raw logits, before bias, penalties, mask and temperature (vLLM's default). With
    `logprobs_mode` masked they are those of the logits after bias, penalties and mask.

    Args:
        stop_token_ids: the model's own, which `min_tokens` suppresses.
    """

    def __init__(self, processors: LogitsProcessors, stop_token_ids: Collection[int]) -> None:
        self.processors = processors
        self._stop_token_ids = stop_token_ids
        self._penalties: Penalties | None = None
        self._distribution: Distribution | None = None
        self._raw: torch.Tensor | None = None
        self._beam_logprobs: torch.Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Announce the step's batch to the logits processors."""
        self.processors.begin(batch)

    def adjust(self, compute: Callable[[], torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the batch's logits, float32 `[rows, vocab]`, with bias, custom processors, penalties and suppression.

        `compute` returns the model's logits. It is called again if a custom processor raises after it has changed some.
        """
        logits = compute()
        if batch.with_logprobs:
            self._raw = logits[batch.with_logprobs].log_softmax(-1)
        penalties = self._penalties_of(batch, logits)

        def biased(logits: torch.Tensor) -> torch.Tensor:
            if penalties is not None:
                if self.processors.before:  # they see suppressed tokens, as in vLLM
                    penalties.suppress_stop_tokens(logits)
                penalties.add_bias(logits)
            return logits

        logits = self.processors.run(self.processors.before, biased(logits), batch, lambda: biased(compute()))
        if penalties is not None:
            penalties.apply(logits)
            penalties.suppress_stop_tokens(logits)
        if batch.beams:
            given = [batch.sequences[row].params.temperature for row in batch.beams]
            heat = logits.new_tensor([one if one >= GREEDY_BELOW else 1.0 for one in given])
            self._beam_logprobs = (logits[batch.beams] / heat[:, None]).log_softmax(-1)
        return logits

    def _penalties_of(self, batch: Batch, logits: torch.Tensor) -> Penalties | None:
        if not (batch.biased or batch.penalised or batch.with_min_tokens):
            return None
        if self._penalties is None or self._penalties.batch is not batch:
            self._penalties = Penalties(batch, logits, self._stop_token_ids)
        return self._penalties

    def sample(self, logits: torch.Tensor, batch: Batch, skip: frozenset[int] = frozenset()) -> SamplerOutput:
        """Sample one token per row from adjusted and masked logits, float32 `[rows, vocab]`.

        Rows in `skip` are not sampled. Their random generators do not advance.
        """
        allowed: list[int] = []
        if batch.detailed:
            allowed = (logits[batch.detailed] > -torch.inf).sum(-1).tolist()
        if (rows := batch.with_masked_logprobs) and self._raw is not None:
            self._raw[np.searchsorted(batch.with_logprobs, rows)] = logits[rows].log_softmax(-1)
        best, chosen = logits.max(-1)
        if batch.random:
            best, chosen = self._draw(logits, best, chosen, batch, skip)
        output = SamplerOutput(chosen.tolist(), skip, failed=self.processors.failed)
        output.allowed = dict(zip(batch.detailed, allowed, strict=True))
        finite = best.isfinite()
        if not finite.all():
            output.broken = [row for row in (~finite).nonzero()[:, 0].tolist() if row not in skip]
        if batch.with_logprobs:
            output.logprobs = self._logprobs(chosen, batch)
        if self._beam_logprobs is not None:
            forbidden = logits[batch.beams].isneginf()
            output.beam_logprobs, self._beam_logprobs = self._beam_logprobs, None
            output.beam_scores = output.beam_logprobs.masked_fill(forbidden, -torch.inf)
        return output

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, greedy: torch.Tensor, batch: Batch, skip: frozenset[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sampled logits and tokens: drawn in random rows, `best` and `greedy` in the others."""
        plan = self._distribution
        if plan is None or plan.batch is not batch:
            plan = self._distribution = Distribution(batch, logits.device)
        sequences = batch.sequences
        uniforms = [0.5 if row in skip else sequences[row].uniforms.next() for row in plan.rows]
        all_random = len(plan.rows) == len(logits)
        if self.processors.after:

            def whole() -> torch.Tensor:
                return plan.scaled_whole(logits)

            processed = self.processors.run(self.processors.after, whole(), batch, whole)
            scaled = processed if all_random else processed[plan.index]
        else:
            scaled = plan.scaled(logits if all_random else logits[plan.index])
        drawn = plan.draw(scaled, uniforms)
        values = scaled.gather(1, drawn[:, None])[:, 0]
        if all_random:
            return values, drawn
        return best.index_copy(0, plan.index, values), greedy.index_copy(0, plan.index, drawn)

    def _logprobs(self, chosen: torch.Tensor, batch: Batch) -> dict[int, TokenLogprobs]:
        raw, rows = self._raw, batch.with_logprobs
        assert raw is not None, "adjust comes before sample"
        self._raw = None
        counts = [batch.sequences[row].params.logprobs or 0 for row in rows]
        return dict(zip(rows, ranked_logprobs(raw, chosen[rows], counts), strict=True))


def ranked_logprobs(logprobs: torch.Tensor, own_ids: torch.Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Return the entries of each row of `logprobs`, float32 `[rows, vocab]`: its own token and the `counts[row]` most
    likely."""
    own = logprobs.gather(1, own_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    found: list[TokenLogprobs] = []
    columns = (own_ids.tolist(), own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    for count, token, value, rank, ids, values in zip(counts, *columns, strict=True):
        entries = [(token, value, rank)]
        entries += (
            (other, logprob, place)
            for place, (other, logprob) in enumerate(zip(ids[:count], values[:count], strict=True), start=1)
            if other != token and logprob > -torch.inf  # the mask may leave fewer
        )
        found.append(TokenLogprobs(*zip(*entries, strict=True)))
    return found
