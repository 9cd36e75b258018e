"""Beam search. It decides as transformers' `generate(num_beams=...)` does."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.memory.block_manager import BlockManager
from engine.sampling.output import SamplerOutput
from engine.step.logprobs import TokenLogprobs, ranked_logprobs
from engine.step.scheduler import Batch
from engine.step.sequence import SequenceGroup, SequenceStatus
from guided.processors.logit_post_processor import LogitPostProcessor


@dataclass(slots=True)
class Beam:
    """An output of a search, which continues a beam of the step before by one token."""

    parent: int
    """Number of the beam that it continues."""
    tokens: list[int]
    """All its output tokens."""
    logprob: float
    """Sum of the log-probabilities of all its output tokens. -inf: the beam is dead,
    and only fills its place."""
    score: float = -math.inf
    """`logprob`, divided by the length to the power of `length_penalty`, once the
    output has ended."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens of an output that has ended, if they are
    requested."""


class BeamSearch:
    """The search of one group. Its beams are in lockstep, dead ones included."""

    def __init__(self, group: SequenceGroup) -> None:
        self.finished: list[Beam] = []
        """The outputs that have ended, best first, at most `width`."""
        self._group = group
        self._params = group.sampling_params
        self._width = group.sampling_params.width
        self._max_tokens = group.max_length - len(group.prompt_token_ids)
        # all beams begin with the same tokens
        self._logprobs = [0.0] + [-math.inf] * (self._width - 1)

    def advance(self, logprobs: Tensor, outputs: list[list[int]]) -> list[Beam] | None:
        """Choose the next beams from the outputs of the beams and the log-probabilities
        of the next token, float32 `[width, vocab]`, -inf where it is forbidden. None:
        the search has ended, and `finished` is the result."""
        length = len(outputs[0]) + 1
        is_last = length >= self._max_tokens
        running: list[Beam] = []
        for rank, beam in enumerate(self._best(logprobs, outputs)):
            if not is_last and not self._is_stopped(beam.tokens):
                running.append(beam)
            elif rank < self._width:
                beam.score = self._score(beam.logprob, length)
                self.finished.append(beam)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self._width :]
        del running[self._width :]
        if not running or not self._can_improve(running[0], length):
            return None
        dead = replace(running[0], logprob=-math.inf)
        running += [dead] * (self._width - len(running))
        self._logprobs = [beam.logprob for beam in running]
        return running

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _is_stopped(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._group.stop_ids:
            return True
        detokenizer = self._group.sequences[0].detokenizer
        return bool(self._params.stop) and detokenizer.completes_stop(
            tokens, self._params.min_tokens
        )

    def _best(self, logprobs: Tensor, outputs: list[list[int]]) -> list[Beam]:
        """Return the best continuations of all beams: enough for `width` of them to go
        on."""
        total = (
            logprobs + torch.tensor(self._logprobs, device=logprobs.device)[:, None]
        ).flatten()
        count = max(2, 1 + len(self._group.stop_ids)) * self._width
        values, places = total.topk(min(count, len(total)))
        beams: list[Beam] = []
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value > -math.inf:
                parent, token = divmod(place, logprobs.shape[1])
                beams.append(Beam(parent, [*outputs[parent], token], value))
        return beams

    def _can_improve(self, best: Beam, length: int) -> bool:
        """Return whether a running beam may still become better than the worst finished
        output."""
        if len(self.finished) < self._width:
            return True
        early = self._params.early_stopping
        if early is True:
            return False
        if early == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._score(best.logprob, length) > self.finished[-1].score


def advance_beams(
    sampled: SamplerOutput,
    batch: Batch,
    blocks: BlockManager,
    processor: LogitPostProcessor,
) -> dict[SequenceGroup, list[Beam]]:
    """Continue each beam of a step from the beam that its search chooses: output,
    blocks and matcher. Returns the searches that have ended: free them, then call
    `show_result`."""
    groups: dict[SequenceGroup, dict[int, int]] = {}
    for place, row in enumerate(batch.beams):
        sequence = batch.sequences[row]
        if row not in sampled.unsampled and not sequence.is_finished():
            groups.setdefault(sequence.group, {})[sequence.seq_id] = place
    ended: dict[SequenceGroup, list[Beam]] = {}
    for group, places in groups.items():
        group.search = group.search or BeamSearch(group)
        rows = [places[sequence.seq_id] for sequence in group.sequences]
        if not _advance(group, rows, sampled, blocks, processor):
            ended[group] = group.search.finished
    return ended


def _advance(
    group: SequenceGroup,
    rows: list[int],
    sampled: SamplerOutput,
    blocks: BlockManager,
    processor: LogitPostProcessor,
) -> bool:
    """Continue one search. `rows` are those of its beams. Returns False if it has
    ended."""
    assert sampled.beam_scores is not None
    assert sampled.beam_logprobs is not None
    group.first_token_time = group.first_token_time or time.monotonic()
    outputs = [sequence.output_token_ids[:] for sequence in group.sequences]
    known = [sequence.record.logprobs[:] for sequence in group.sequences]
    logprobs = sampled.beam_logprobs[rows]
    beams = group.search.advance(sampled.beam_scores[rows], outputs)

    def scored(beam: Beam) -> list[TokenLogprobs]:
        count = group.sampling_params.logprobs
        if count is None:
            return []
        row = logprobs[beam.parent]
        return known[beam.parent] + ranked_logprobs(
            row[None], row.new_tensor([beam.tokens[-1]]).long(), [count]
        )

    for beam in group.search.finished:
        if len(beam.tokens) > len(outputs[0]):  # it has ended in this step
            beam.logprobs = scored(beam)
    if beams is None:
        return False
    ids = [sequence.seq_id for sequence in group.sequences]
    blocks.take_over(
        {
            ids[place]: ids[beam.parent]
            for place, beam in enumerate(beams)
            if place != beam.parent
        }
    )
    for sequence, output, beam in zip(group.sequences, outputs, beams, strict=True):
        if sequence.view is not None and output != outputs[beam.parent]:
            pairs = enumerate(zip(output, beam.tokens, strict=False))
            processor.rollback(
                sequence.seq_id,
                next(place for place, (old, new) in pairs if old != new),
            )
        sequence.take_over(beam.tokens, beam.logprob, scored(beam))
    return True


def show_result(group: SequenceGroup, finished: list[Beam]) -> None:
    """Replace the sequences of a search that has ended by its finished outputs, best
    first."""
    for sequence in group.sequences:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
    del group.sequences[max(1, len(finished)) :]
    for sequence, beam in zip(group.sequences, finished, strict=False):
        sequence.take_over(beam.tokens, beam.logprob, beam.logprobs)
        sequence.status = SequenceStatus.RUNNING
        sequence.end_if_complete()
