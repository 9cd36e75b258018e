"""SamplerOutput: the tokens of one step, and what requests want to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.step.logprobs import TokenLogprobs
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
