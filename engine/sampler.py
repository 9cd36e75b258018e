"""Sampler: samples tokens from logits, for a whole batch at once.

`adjust` applies what the requests ask for (`engine/adjustments.py`). Then the engine
applies the mask. `sample` applies temperature, min_p, argmax-invariant custom
processors, top_k and top_p, and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.adjustments import Adjustments
from engine.distribution import Distribution
from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.step.logprobs import TokenLogprobs
from engine.step.scheduler import Batch
from guided.processors.cuda_kernel import end_of_work
from guided.sequence import SequenceOutput


@dataclass(slots=True)
class SamplerOutput:
    """One step's tokens. Entry i is of row i, and meaningless for an unsampled row."""

    token_ids: list[int]
    unsampled: frozenset[int] = frozenset()
    """Rows without a token: their mask is late or was vetoed, or their mask or a logits
    processor has failed."""
    broken: list[int] = field(default_factory=list)
    """Rows of which the sampled or the largest logit is not finite: the mask forbids
    every token, or the model computed NaN."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, if requested: those of the sampled token and of the most likely
    tokens."""
    measured: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By row, if requested, and of a few constrained rows now and then: the number of
    tokens that could be sampled, and the log of their kept mass. That is their
    probability in the model's own distribution: before bias, penalties and mask, at
    temperature 1."""
    beam_logprobs: Tensor | None = None
    """float32 `[len(batch.beams), vocab]`: of the adjusted logits, before the mask."""
    beam_scores: Tensor | None = None
    """The same, -inf where the mask forbids."""

    def sample_of(self, row: int, seq_id: int) -> SequenceOutput:
        """Return the token of a row, which continues sequence `seq_id`."""
        return SequenceOutput(seq_id, self.token_ids[row], self.logprobs.get(row, {}))


class Sampler:
    """Call once per step: `adjust` before the mask, `sample` after it."""

    def __init__(
        self, processors: CustomLogitsProcessors, stop_token_ids: Tokens[int]
    ) -> None:
        self.processors = processors
        self._adjustments = Adjustments(processors, stop_token_ids)
        self.adjust = self._adjustments.apply
        """Compute the adjusted logits of a batch."""

    def sample(
        self,
        logits: Tensor,
        batch: Batch,
        unsampled: frozenset[int] = frozenset(),
        launch: Callable[[Tensor], None] | None = None,
    ) -> SamplerOutput:
        """Sample one token per row from adjusted and masked logits, float32 `[rows,
        vocab]`. The random generators of `unsampled` rows do not advance. `launch` gets
        the tokens on the device, int64 `[rows]`, before the host waits for them, unless
        the host reads more of this step than its tokens."""
        best, chosen = logits.max(-1)
        is_finite = best.isfinite()
        if batch.random:
            best, chosen = self._draw(logits, best, chosen, batch, unsampled)
            is_finite &= best.isfinite()
        read = _start_reading(torch.stack((chosen, is_finite)))
        if launch is not None and not unsampled and not self._adjustments.reads(batch):
            launch(chosen)
        token_ids, finite = read()  # the step's one synchronisation
        output = SamplerOutput(token_ids, unsampled)
        output.broken = [
            row
            for row, finite_row in enumerate(finite)
            if not finite_row and row not in unsampled
        ]
        self._adjustments.report(output, logits, batch)
        return output

    def _draw(
        self,
        logits: Tensor,
        best: Tensor,
        greedy: Tensor,
        batch: Batch,
        unsampled: frozenset[int],
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled logits and tokens: drawn in random rows, `best` and
        `greedy` in the others."""
        plan = batch.plan(Distribution, logits.device)
        uniforms = [
            0.5 if row in unsampled else next(batch.sequences[row].uniforms)
            for row in plan.rows
        ]
        all_random = len(plan.rows) == len(logits)
        if all_random:
            scaled = plan.scaled(logits)
        else:
            scaled = plan.scaled(logits[plan.index])
        if self.processors.after:
            scaled = self._processed(logits, plan.index, scaled, batch)
        drawn = plan.draw(scaled, uniforms)
        values = scaled.gather(1, drawn[:, None])[:, 0]
        if all_random:
            return values, drawn
        return best.index_copy(0, plan.index, values), greedy.index_copy(
            0, plan.index, drawn
        )

    def _processed(
        self, logits: Tensor, random: Tensor, scaled: Tensor, batch: Batch
    ) -> Tensor:
        """Run argmax-invariant custom processors on all rows. Returns the random rows,
        `scaled` before."""

        def whole() -> Tensor:
            return logits.index_copy(0, random, scaled)

        return self.processors.run(self.processors.after, whole(), batch, whole)[random]


def _start_reading(values: Tensor) -> Callable[[], list[list[int]]]:
    """Start a copy to the host. The function that is returned waits for it, but not for
    what is launched later."""
    if not values.is_cuda:
        return values.tolist
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
        values, non_blocking=True
    )
    done = end_of_work(values)

    def read() -> list[list[int]]:
        done.synchronize()
        return copied.tolist()

    return read
