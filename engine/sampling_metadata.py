"""SamplingMetadata: the rows of a step that are sampled, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams, SamplingType
from engine.scheduler import Chunk, ScheduledBatch
from engine.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of the hidden states that predict tokens with requested log-probabilities, which were not sampled: prompt
    tokens and forced tokens."""

    sequence: Sequence
    first: int
    """Row of the hidden states that predicts the first of `tokens`."""
    tokens: list[int]
    of_prompt: bool

    @property
    def rows(self) -> range:
        """Rows of the hidden states."""
        return range(self.first, self.first + len(self.tokens))

    @classmethod
    def of(cls, chunk: Chunk, begin: int) -> Iterator[ScoredRows]:
        """Yield the rows of a chunk that begins at row `begin`. Tokens that are scored already are left out."""
        sequence = chunk.sequences[0]
        group, num_prompt = sequence.group, len(sequence.data.prompt_token_ids)
        wanted: list[tuple[int, int]] = []
        if sequence.params.prompt_logprobs is not None:
            wanted.append((len(group.prompt_logprobs), min(chunk.end + 1, num_prompt)))
        if sequence.has_unscored_tokens:
            wanted.append((num_prompt + len(sequence.output_logprobs), min(chunk.end + 1, sequence.length)))
        for known, last in wanted:
            if known < last:
                tokens = sequence.data.span(known, last)
                yield cls(sequence, begin + known - 1 - chunk.start, tokens, of_prompt=known < num_prompt)


class SequenceGroupToSample(NamedTuple):
    """A group's rows among `SamplingMetadata.selected_token_indices`."""

    seq_ids: list[int]
    prompt_logprob_indices: list[int]
    """Those that score a prompt token."""
    sample_indices: list[int]
    """Those that are sampled. The sequences of a prompt have one in common."""


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
        """The rows for the post-processors: those with a constraint, or all."""
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
        self.with_logprobs = [row for row, sequence in enumerate(self.sequences) if sequence.needs_logprobs]
        self.with_masked_logprobs = [row for row in self.with_logprobs if params[row].logprobs_mode == "masked"]
        self.detailed = rows(lambda one: one.mask_details)
        self.beams = rows(lambda one: one.use_beam_search)
        self.with_stop_strings = rows(lambda one: one.stop and not one.use_beam_search)

    @classmethod
    def prepare(
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
    def selected_token_indices(self) -> list[int]:
        """Rows of the hidden states with logits that are needed: to sample them, or to score tokens of prompts."""
        return sorted({*self._sampled_rows, *(row for one in self.scored if one.of_prompt for row in one.rows)})

    @property
    def seq_groups(self) -> list[SequenceGroupToSample]:
        """The groups of the step, in the order of their rows."""
        place = {row: index for index, row in enumerate(self.selected_token_indices)}
        found: dict[SequenceGroup, SequenceGroupToSample] = {}
        scored = [(one.rows.start, one.sequence, 1, [*one.rows]) for one in self.scored if one.of_prompt]
        sampled = zip(self._sampled_rows, self.sequences, strict=True)
        rows = scored + [(row, sequence, 2, [row]) for row, sequence in sampled]
        for _, sequence, which, own in sorted(rows, key=lambda one: one[0]):
            group = found.setdefault(sequence.group, SequenceGroupToSample([], [], []))
            if sequence.seq_id not in group.seq_ids:
                group.seq_ids.append(sequence.seq_id)
            group[which].extend(place[row] for row in own if place[row] not in group[which])
        return list(found.values())

    @property
    def categorized_sample_indices(self) -> dict[SamplingType, list[tuple[int, int]]]:
        """By type: for each sequence its place among `selected_token_indices`, and its row of the sampled logits."""
        place = {row: index for index, row in enumerate(self.selected_token_indices)}
        found: dict[SamplingType, list[tuple[int, int]]] = {kind: [] for kind in SamplingType}
        for index, (row, sequence) in enumerate(zip(self._sampled_rows, self.sequences, strict=True)):
            found[sequence.params.sampling_type].append((place[row], index))
        return found

    @property
    def _sampled_rows(self) -> list[int]:
        return list(range(len(self.sequences))) if self.selected is None else self.selected.tolist()

    @property
    def is_all_greedy(self) -> bool:
        """No row needs a random number."""
        return not self.random
