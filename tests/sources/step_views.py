"""A step by groups, as vLLM's early engine and its notes describe it, read off the
engine's `Batch` of rows."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from engine.memory.block_manager import BlockManager
from engine.sampling.output import SamplerOutput
from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs
from engine.step.scheduler import Batch
from engine.step.sequence import Sequence, SequenceGroup
from guided.sequence import SequenceOutput


class SamplingType(Enum):
    GREEDY = auto()
    RANDOM = auto()
    RANDOM_SEED = auto()


class SequenceGroupMetadata(NamedTuple):
    request_id: str
    is_prompt: bool
    seq_data: dict[int, Sequence]
    sampling_params: SamplingParams
    block_tables: dict[int, list[int]]


def seq_group_metadata_list(
    batch: Batch, blocks: BlockManager
) -> list[SequenceGroupMetadata]:
    parts = [(True, chunk.sequences) for chunk in batch.prefills]
    groups = dict.fromkeys(sequence.group for sequence in batch.decodes)
    parts += [
        (False, [one for one in batch.decodes if one.group is group])
        for group in groups
    ]
    return [
        SequenceGroupMetadata(
            sequences[0].group.request_id,
            is_prompt,
            {sequence.seq_id: sequence for sequence in sequences},
            sequences[0].params,
            {sequence.seq_id: blocks.blocks(sequence.seq_id) for sequence in sequences},
        )
        for is_prompt, sequences in parts
    ]


SequenceGroupToSample = tuple[list[int], list[int]]
"""(prompt_logprob_indices, sample_indices)"""


class SamplingMetadata:
    def __init__(self, batch: Batch) -> None:
        assert batch.selected is not None
        scored = [
            (chunk.row + token - 1 - chunk.start, chunk.sequences[0].group)
            for chunk in batch.prefills
            for first, last in chunk.unscored()
            for token in range(first, last)
        ]
        sampled = [
            (row, one.group)
            for row, one in zip(batch.selected, batch.sequences, strict=True)
        ]
        self.selected_token_indices = sorted({row for row, _ in scored + sampled})
        place = {row: index for index, row in enumerate(self.selected_token_indices)}
        found: dict[SequenceGroup, SequenceGroupToSample] = {}
        for kind, rows in enumerate((scored, sampled)):
            for row, group in rows:
                found.setdefault(group, ([], []))[kind].append(place[row])
        self.seq_groups = sorted(found.values(), key=lambda one: one[0] + one[1])
        self.categorized_sample_indices: dict[SamplingType, list[tuple[int, int]]] = {
            kind: [] for kind in SamplingType
        }
        for index, (row, sequence) in enumerate(
            zip(batch.selected, batch.sequences, strict=True)
        ):
            kind_of = (
                SamplingType.RANDOM
                if sequence.params.seed is None
                else SamplingType.RANDOM_SEED
            )
            kind_of = SamplingType.GREEDY if sequence.params.is_greedy else kind_of
            self.categorized_sample_indices[kind_of].append((place[row], index))


class SequenceGroupOutput(NamedTuple):
    samples: list[SequenceOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None


def by_group(output: SamplerOutput, batch: Batch) -> list[SequenceGroupOutput]:
    found: dict[SequenceGroup, SequenceGroupOutput] = {}
    for row, sequence in enumerate(batch.sequences):
        group = sequence.group
        wanted = (
            group.prompt_logprobs
            if group.sampling_params.prompt_logprobs is not None
            else None
        )
        found.setdefault(group, SequenceGroupOutput([], wanted)).samples.append(
            output.sample_of(row, sequence.seq_id)
        )
    return list(found.values())
