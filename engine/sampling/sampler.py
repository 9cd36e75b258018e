"""Sampler: samples tokens from logits, for a whole batch at once.

`adjust` applies what the requests ask for (`engine/sampling/adjustments.py`). Then the engine
applies the mask. `sample` applies temperature, min_p, argmax-invariant custom
processors, top_k and top_p, and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.sampling.adjustments import Adjustments
from engine.sampling.distribution import Distribution
from engine.sampling.output import SamplerOutput
from engine.step.scheduler import Batch
from guided.processors.cuda_kernel import end_of_work


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
        token_ids, finite = read()  # waits for the device
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
