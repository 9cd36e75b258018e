"""SamplingMetadata: the rows of a step that are sampled, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams
from engine.scheduler import Chunk, ScheduledBatch
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of the hidden states that predict tokens with requested log-probabilities, which were not sampled: prompt
    tokens and forced tokens."""

    sequence: Sequence
    first: int
    """Row of the hidden states that predicts the first of `tokens`."""
    tokens: list[int]
    of_prompt: bool

    @classmethod
    def of(cls, chunk: Chunk, begin: int) -> Iterator[ScoredRows]:
        """Yield the rows of a chunk that begins at row `begin`. Tokens that are scored already are left out."""
        sequence = chunk.sequences[0]
        group, num_prompt = sequence.group, len(sequence.data.prompt_token_ids)
        wanted: list[tuple[int, int]] = []
        if sequence.params.prompt_logprobs is not None:
            wanted.append((len(group.prompt_logprobs), min(chunk.end + 1, num_prompt)))
        if sequence.has_unscored_tokens:
            wanted.append((num_prompt + len(sequence.logprobs), min(chunk.end + 1, sequence.length)))
        for known, last in wanted:
            if known < last:
                tokens = sequence.data.span(known, last)
                yield cls(sequence, begin + known - 1 - chunk.start, tokens, of_prompt=known < num_prompt)


@dataclass(eq=False)
class SamplingMetadata:
    """How a step's logits are sampled. Row i of the logits is that of `sequences[i]`.

    It depends on nothing but the sequences of the batch. One object serves step after step while they stay the same.
    """

    sequences: list[Sequence]
    selected: torch.Tensor | None
    """int64 `[rows]`: the rows of the hidden states that are sampled. None: all, in order.

    The last row of a prefill is there once for each of its sequences. Rows of earlier chunks are not sampled."""
    device: torch.device
    scored: tuple[ScoredRows, ...] = ()
    """Tokens to score that are not sampled."""
    drafted: dict[int, list[int]] = field(default_factory=dict)
    """By row of a sequence with drafts: the drafts. Their rows follow."""
    changed: dict[int, int] = field(default_factory=dict)
    """By id of a draft's row: the length of the output that its matcher can keep."""
    appended: NDArray[np.int32] | None = None
    """int32 `[rows]`: the tokens of the last step with this object, if that is all that has changed since."""

    def __post_init__(self) -> None:
        guided = [row for row, sequence in enumerate(self.sequences) if sequence.guided is not None]
        self.guided = tuple(sequence.guided for sequence in self.sequences if sequence.guided is not None)
        """The rows with a constraint, for the post-processor."""
        self.guided_rows = np.array(guided, np.intp)
        """int `[len(guided)]`: their row numbers."""
        self.draft_rows = frozenset(at + 1 + n for at, drafts in self.drafted.items() for n in range(len(drafts)))
        """Rows of drafts: they are sampled only to decide on the drafts."""
        params = [sequence.params for sequence in self.sequences]

        def rows(applies: Callable[[SamplingParams], object]) -> list[int]:
            return [row for row, one in enumerate(params) if applies(one)]

        self.random = rows(lambda one: not one.is_greedy)
        self.with_min_p = rows(lambda one: one.min_p and not one.is_greedy)
        self.biased = rows(lambda one: one.logit_bias)
        self.penalised = rows(lambda one: one.has_penalties)
        self.with_min_tokens = rows(lambda one: one.min_tokens)
        self.without_eos = rows(lambda one: one.ignore_eos)
        self.with_logprobs = rows(lambda one: one.needs_logprobs)
        self.with_masked_logprobs = rows(lambda one: one.needs_logprobs and one.logprobs_mode == "masked")
        self.detailed = rows(lambda one: one.mask_details)
        self.beams = rows(lambda one: one.use_beam_search)
        self.with_stop_strings = rows(lambda one: one.stop)

    @classmethod
    def for_batch(
        cls, batch: ScheduledBatch, device: torch.device, previous: SamplingMetadata | None
    ) -> SamplingMetadata:
        """Return the metadata of a batch: `previous`, if neither step has a prefill and the sequences are the same."""
        if not batch.prefills:
            if previous is not None and previous.selected is None and previous.sequences == batch.decodes:
                return previous
            return cls(batch.decodes, None, device)
        sequences: list[Sequence] = []
        selected: list[int] = []
        scored: list[ScoredRows] = []
        drafted: dict[int, list[int]] = {}
        changed: dict[int, int] = {}
        end = 0
        for chunk in batch.prefills:
            scored += ScoredRows.of(chunk, end)
            end += chunk.end - chunk.start
            if chunk.drafts:
                drafts = chunk.sequences[0].drafts
                assert drafts is not None
                drafted[len(sequences)] = chunk.drafts
                rows = drafts.rows(chunk.drafts)
                changed.update((row.seq_id, length) for row, length in rows if length is not None)
                sequences += [chunk.sequences[0], *(row for row, _ in rows)]
                selected += range(end - len(chunk.drafts) - 1, end)
            elif chunk.is_last:
                sequences += chunk.sequences
                selected += [end - 1] * len(chunk.sequences)
        selected += range(end, end + len(batch.decodes))
        where = torch.tensor(selected, dtype=torch.int64, device=device)
        return cls(sequences + batch.decodes, where, device, tuple(scored), drafted, changed)

    @property
    def is_all_greedy(self) -> bool:
        """No row needs a random number."""
        return not self.random
