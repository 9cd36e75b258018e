"""SamplingMetadata: which rows of a step are sampled, for whom, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.scheduler import ScheduledBatch
from engine.sequence import Sequence
from guided.sequence import GuidedSequence

__all__ = ["SamplingMetadata"]


@dataclass(eq=False)
class SamplingMetadata:
    """How a step's logits are sampled. Row i of the logits is `sequences[i]`'s.

    Nearly all of it depends only on who is in the batch: while that doesn't change, one object serves step after step.
    """

    sequences: list[Sequence]
    selected: torch.Tensor | None
    """int64 `[rows]`: the rows of the hidden states that are sampled, a prefill's last once for each of its sequences;
    None where they are all, in order."""
    num_prompt_rows: int
    """The first so many rows end a prefill; the others are decodes."""
    device: torch.device

    greedy: list[int] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    """Rows whose randomness comes from the engine's seed and the request id."""
    seeded: list[int] = field(default_factory=list)
    """Rows whose randomness comes from the request's own seed."""
    guided: tuple[GuidedSequence, ...] = ()
    """The rows with a constraint, as the post-processor takes them."""
    guided_rows: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """int `[len(guided)]`: where they are."""
    biased: list[int] = field(default_factory=list)
    penalised: list[int] = field(default_factory=list)
    with_min_tokens: list[int] = field(default_factory=list)
    without_eos: list[int] = field(default_factory=list)
    with_logprobs: list[int] = field(default_factory=list)
    with_min_p: list[int] = field(default_factory=list)
    """Of the random rows."""
    stop_checked: list[int] = field(default_factory=list)
    """Rows with stop strings."""

    @classmethod
    def for_batch(
        cls, batch: ScheduledBatch, device: torch.device, previous: SamplingMetadata | None
    ) -> SamplingMetadata:
        """The metadata of a batch; `previous` again, if it is of the same sequences and neither step has a prefill."""
        if not batch.prefills:
            if previous is not None and previous.selected is None and previous.sequences == batch.decodes:
                return previous
            metadata = cls(batch.decodes, None, 0, device)
        else:
            sequences: list[Sequence] = []
            selected: list[int] = []
            end = 0
            for prefill in batch.prefills:
                end += prefill.num_tokens
                sequences += prefill.sequences
                selected += [end - 1] * len(prefill.sequences)
            num_prompt_rows = len(sequences)
            selected += range(end, end + len(batch.decodes))
            rows = torch.tensor(selected, dtype=torch.int64, device=device)
            metadata = cls(sequences + batch.decodes, rows, num_prompt_rows, device)
        metadata._sort()
        return metadata

    @classmethod
    def for_parked(cls, sequences: list[Sequence], device: torch.device) -> SamplingMetadata:
        """The metadata of sequences that are sampled from the logits that were kept of them."""
        metadata = cls(sequences, None, 0, device)
        metadata._sort()
        return metadata

    @property
    def is_all_greedy(self) -> bool:
        """No row needs a random number."""
        return len(self.greedy) == len(self.sequences)

    def _sort(self) -> None:
        guided = [row for row, sequence in enumerate(self.sequences) if sequence.guided is not None]
        self.guided = tuple(sequence.guided for sequence in self.sequences if sequence.guided is not None)
        self.guided_rows = np.array(guided, np.intp)
        for row, sequence in enumerate(self.sequences):
            params = sequence.params
            if params.is_greedy:
                self.greedy.append(row)
            else:
                (self.random if params.seed is None else self.seeded).append(row)
                if params.min_p > 0.0:
                    self.with_min_p.append(row)
            if params.logit_bias:
                self.biased.append(row)
            if params.has_penalties:
                self.penalised.append(row)
            if params.min_tokens:
                self.with_min_tokens.append(row)
            if params.ignore_eos:
                self.without_eos.append(row)
            if params.logprobs is not None:
                self.with_logprobs.append(row)
            if params.stop:
                self.stop_checked.append(row)
