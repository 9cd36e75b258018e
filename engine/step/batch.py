"""Batch: the work of one step. It goes from the scheduler through the model and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from engine.sampling_params import SamplingParams
from engine.step.restriction import Restriction
from engine.step.sequence import Sequence

_numbers = count()  # shared by the engines of a process: they may use one pool
Plan = TypeVar("Plan")


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
        num_prompt = len(sequence.prompt_token_ids)
        if sequence.params.prompt_logprobs is not None:
            known = len(sequence.group.prompt_logprobs)
            last = min(self.end + 1, num_prompt)
            if known < last:
                yield known, last
        if sequence.has_unscored_tokens:
            known = num_prompt + sequence.record.num_scored(sequence.num_output_tokens)
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
        self.sequences = decodes
        """The sampled sequences."""
        self.selected: list[int] | None = None
        """The rows of the forward pass that are sampled. None: all, in order. The last row of a prefill is there once
        for each of its sequences. Rows of earlier chunks are not sampled."""
        self.hidden: Tensor
        """`[rows, hidden]`: the hidden states of the sampled rows, those of `kept` last. Set by the step."""
        if prefills or kept:
            self._select()
        processed = [row for row, sequence in enumerate(self.sequences) if sequence.view is not None]
        self.processed = tuple(sequence.view for sequence in self.sequences if sequence.view is not None)
        """The sequences that post-processors see: those with a constraint, or all."""
        self.processed_rows = np.array(processed, np.intp)
        """int `[len(processed)]`: their row numbers."""
        params = [sequence.params for sequence in self.sequences]
        self._plans: dict[object, Any] = {}

        def rows(applies: Callable[[SamplingParams], object]) -> list[int]:
            return [row for row, request in enumerate(params) if applies(request)]

        # The rows that each part of sampling is for.
        self.constrained = rows(lambda request: request.constraint is not None)
        self.random = rows(lambda request: not request.is_greedy)
        self.biased = rows(lambda request: request.logit_bias)
        self.penalised = rows(lambda request: request.has_penalties)
        self.with_min_tokens = rows(lambda request: request.min_tokens)
        self.beams = rows(lambda request: request.use_beam_search)
        self.with_logprobs: list[int] = []
        self.with_masked_logprobs: list[int] = []
        self.measured: list[int] = []
        """Rows with details of their masks."""
        self.restricted: list[tuple[int, Restriction]] = []
        self.searched: list[tuple[int, set[int]]] = []
        """Rows with a structural tag and stop strings: `Detokenizer.free_places` of each."""
        for row, sequence in enumerate(self.sequences):
            if sequence.record.needs_logprobs:
                self.with_logprobs.append(row)
                if params[row].logprobs_mode == "masked":
                    self.with_masked_logprobs.append(row)
            if sequence.record.details is not None:
                self.measured.append(row)
            if sequence.group.restriction is not None:
                self.restricted.append((row, sequence.group.restriction))
            if sequence.detokenizer.free_places is not None:
                self.searched.append((row, sequence.detokenizer.free_places))

    def plan(self, make: Callable[..., Plan], *arguments: Any) -> Plan:
        """Return what `make` makes of this batch and `arguments`, once for all steps with these rows."""
        if make not in self._plans:
            self._plans[make] = make(self, *arguments)
        plan: Plan = self._plans[make]
        return plan

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
