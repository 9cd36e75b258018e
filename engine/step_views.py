"""A step by groups, as vLLM's early engine and its notes describe it. The engine itself works on rows (`Batch`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.logprobs import TokenLogprobs
from engine.sampler import SamplerOutput
from engine.sampling_params import SamplingParams, SamplingType
from engine.sequence import SequenceData, SequenceGroup
from guided.sequence import SequenceOutput


@dataclass(frozen=True, slots=True)
class SequenceGroupMetadata:
    """A group's part of a step."""

    request_id: str
    is_prompt: bool
    """It is a prefill."""
    seq_data: dict[int, SequenceData]
    """By sequence id."""
    sampling_params: SamplingParams
    block_tables: dict[int, list[int]]
    """By sequence id."""


def seq_group_metadata_list(batch: Batch, blocks: BlockManager) -> list[SequenceGroupMetadata]:
    """Describe a scheduled batch by groups: the prefills, then the decodes."""
    parts = [(True, chunk.sequences) for chunk in batch.prefills]
    groups = dict.fromkeys(sequence.group for sequence in batch.decodes)
    parts += [(False, [one for one in batch.decodes if one.group is group]) for group in groups]
    return [
        SequenceGroupMetadata(
            sequences[0].group.request_id,
            is_prompt,
            {sequence.seq_id: sequence.data for sequence in sequences},
            sequences[0].params,
            {sequence.seq_id: blocks.blocks(sequence.seq_id) for sequence in sequences},
        )
        for is_prompt, sequences in parts
    ]


class SequenceGroupToSample(NamedTuple):
    """A group's rows among `SamplingMetadata.selected_token_indices`."""

    seq_ids: list[int]
    prompt_logprob_indices: list[int]
    """Those that score a prompt token."""
    sample_indices: list[int]
    """Those that are sampled. The sequences of a prompt have one in common."""


class SamplingMetadata:
    """The rows of a batch that sampling reads."""

    def __init__(self, batch: Batch) -> None:
        rows = list(range(len(batch.sequences))) if batch.selected is None else batch.selected
        sampled = list(zip(rows, batch.sequences, strict=True))
        scored = [
            (chunk.row + token - 1 - chunk.start, chunk.sequences[0])
            for chunk in batch.prefills
            for first, last in chunk.unscored()
            for token in range(first, last)
            if last <= len(chunk.sequences[0].data.prompt_token_ids)
        ]
        self.selected_token_indices = sorted({row for row, _ in sampled + scored})
        """Rows of the hidden states with logits that are needed: to sample them, or to score tokens of prompts."""
        place = {row: index for index, row in enumerate(self.selected_token_indices)}
        found: dict[SequenceGroup, SequenceGroupToSample] = {}
        marked = [(row, sequence, 1) for row, sequence in scored] + [(row, sequence, 2) for row, sequence in sampled]
        for row, sequence, kind in sorted(marked, key=lambda one: one[0]):
            group = found.setdefault(sequence.group, SequenceGroupToSample([], [], []))
            if sequence.seq_id not in group.seq_ids:
                group.seq_ids.append(sequence.seq_id)
            if place[row] not in group[kind]:
                group[kind].append(place[row])
        self.seq_groups = list(found.values())
        """The groups of the step, in the order of their rows."""
        self.categorized_sample_indices: dict[SamplingType, list[tuple[int, int]]] = {kind: [] for kind in SamplingType}
        """By type: for each sequence its place among `selected_token_indices`, and its row of the sampled logits."""
        for index, (row, sequence) in enumerate(sampled):
            self.categorized_sample_indices[sequence.params.sampling_type].append((place[row], index))


class SequenceGroupOutput(NamedTuple):
    """One step's tokens of a group."""

    samples: list[SequenceOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None


def by_group(output: SamplerOutput, batch: Batch) -> list[SequenceGroupOutput]:
    """Return the tokens of a step by groups."""
    found: dict[SequenceGroup, SequenceGroupOutput] = {}
    for row, sequence in enumerate(batch.sequences):
        group = sequence.group
        wanted = group.prompt_logprobs if group.sampling_params.prompt_logprobs is not None else None
        entry = found.setdefault(group, SequenceGroupOutput([], wanted))
        entry.samples.append(output.sample_of(row, sequence.seq_id))
    return list(found.values())
