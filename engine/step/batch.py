"""Batch: the work of one step. It goes from the scheduler through the model and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from engine.sampling_params import SamplingParams
from engine.step.sequence import Sequence

_numbers = count()  # shared by the engines of a process: they may use one pool


@dataclass(slots=True)
class Chunk:
    """Part of a prefill: tokens `start` to `end` of sequences that have the same tokens and blocks."""

    sequences: list[Sequence]
    start: int
    end: int
    row: int = 0
    """Row of the hidden states of its first token. Set by `Batch`."""

    @property
    def is_last(self) -> bool:
        """The sequences are sampled after this chunk."""
        return self.end == self.sequences[0].length

    def unscored(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of its prompt tokens and forced tokens that have no log-probabilities yet, although they
        are wanted. Row `row + first - 1 - start` predicts `first`."""
        sequence = self.sequences[0]
        num_prompt = len(sequence.data.prompt_token_ids)
        if sequence.params.prompt_logprobs is not None:
            known = len(sequence.group.prompt_logprobs)
            last = min(self.end + 1, num_prompt)
            if known < last:
                yield known, last
        if sequence.has_unscored_tokens:
            known = num_prompt + sequence.num_scored
            last = min(self.end + 1, sequence.length)
            if known < last:
                yield known, last


class Batch:
    """Chunks of prefills, one token for each decoding sequence, shortest first, and sequences that have kept the hidden
    state of their last token. Row i of the logits is that of `sequences[i]`. `copies` are (source, target) blocks to
    copy before the forward pass: all sources are read before any target is written. One object serves step after step
    while only the same sequences decode."""

    def __init__(
        self, prefills: list[Chunk], decodes: list[Sequence], kept: list[Sequence], copies: list[tuple[int, int]]
    ) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.kept = kept
        self.copies = copies
        self.number = next(_numbers)
        """Another one for each object: the rows of a batch don't change."""
        self.is_repeatable = True
        """The next step may use this object again."""
        self.sequences = decodes
        """The sampled sequences."""
        self.selected: list[int] | None = None
        """The rows of the forward pass that are sampled. None: all, in order. The last row of a prefill is there once
        for each of its sequences. Rows of earlier chunks are not sampled."""
        self.hidden: torch.Tensor
        """`[rows, hidden]`: the hidden states of the sampled rows, those of `kept` last. Set by the step."""
        if prefills or kept:
            self._select()
        guided = [row for row, sequence in enumerate(self.sequences) if sequence.guided is not None]
        self.guided = tuple(sequence.guided for sequence in self.sequences if sequence.guided is not None)
        """The rows for the post-processors: those with a constraint, or all."""
        self.guided_rows = np.array(guided, np.intp)
        """int `[len(guided)]`: their row numbers."""
        params = [sequence.params for sequence in self.sequences]

        def rows(applies: Callable[[SamplingParams], object]) -> list[int]:
            return [row for row, one in enumerate(params) if applies(one)]

        # The rows that each part of sampling is for.
        self.random = rows(lambda one: not one.is_greedy)
        self.biased = rows(lambda one: one.logit_bias)
        self.penalised = rows(lambda one: one.has_penalties)
        self.with_min_tokens = rows(lambda one: one.min_tokens)
        self.with_logprobs = [row for row, sequence in enumerate(self.sequences) if sequence.needs_logprobs]
        self.with_masked_logprobs = [row for row in self.with_logprobs if params[row].logprobs_mode == "masked"]
        places = [sequence.detokenizer.free_places for sequence in self.sequences]
        self.searched = [(row, free) for row, free in enumerate(places) if free is not None]
        """Rows with a structural tag and stop strings: `Detokenizer.free_places` of each."""
        limits = [sequence.restriction for sequence in self.sequences]
        self.restricted = [(row, restriction) for row, restriction in enumerate(limits) if restriction is not None]
        self.measured = [row for row, sequence in enumerate(self.sequences) if sequence.details is not None]
        self.beams = rows(lambda one: one.use_beam_search)

    def _select(self) -> None:
        self.sequences = []
        self.selected = []
        end = 0
        for chunk in self.prefills:
            chunk.row = end
            end = end + chunk.end - chunk.start
            if chunk.is_last:
                self.sequences += chunk.sequences
                self.selected += [end - 1] * len(chunk.sequences)
        self.sequences += self.decodes
        self.selected += range(end, end + len(self.decodes))
        self.sequences += self.kept

    @property
    def is_empty(self) -> bool:
        return not self.computes and not self.kept

    @property
    def computes(self) -> bool:
        """Whether there is a forward pass: a token to compute."""
        return bool(self.prefills or self.decodes)

    @property
    def all_sequences(self) -> list[Sequence]:
        """All sequences of the step, sampled or not."""
        return self.decodes + self.kept + [sequence for chunk in self.prefills for sequence in chunk.sequences]
