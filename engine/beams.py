"""Beam search. It decides as transformers' `generate(num_beams=...)` does."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.memory.block_manager import BlockManager
from engine.sampler import SamplerOutput, ranked_logprobs
from engine.step.batch import Batch
from engine.step.logprobs import TokenLogprobs
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.processors.logit_post_processor import LogitPostProcessor


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam, continued by a token."""

    beam: int
    token: int
    logprob: float
    """Sum of the log-probabilities of all its output tokens. -inf: the beam is dead, and only fills its place."""


@dataclass(slots=True)
class Hypothesis:
    """A finished output."""

    score: float
    """Sum of the log-probabilities, divided by the length to the power of `length_penalty`."""
    candidate: Candidate
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of its tokens, if they are requested."""


class BeamSearch:
    """The search of one group. Its beams are in lockstep, dead ones included."""

    def __init__(self, group: SequenceGroup) -> None:
        self.finished: list[Hypothesis] = []
        """Best first, at most `width`."""
        self._group = group
        self._detokenizer = group.sequences[0].detokenizer
        self._params = group.sampling_params
        self._width = group.sampling_params.width
        self._max_tokens = group.max_length - len(group.prompt_token_ids)
        self._logprobs = [0.0] + [-math.inf] * (self._width - 1)  # all beams begin with the same tokens

    def advance(self, logprobs: Tensor, outputs: list[list[int]]) -> list[Candidate] | None:
        """Choose the next beams from the outputs of each and the log-probabilities of the next token, float32
        `[width, vocab]`, -inf where it is forbidden. None: the search has ended, and `finished` is the result."""
        length = len(outputs[0]) + 1
        best = self._best(logprobs)
        is_last = length >= self._max_tokens
        stopped = {one for one in best if self._is_stopped([*outputs[one.beam], one.token])}
        ended = [one for one in best[: self._width] if is_last or one in stopped]
        self.finished += [
            Hypothesis(self._score(one.logprob, length), one, [*outputs[one.beam], one.token]) for one in ended
        ]
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._width :]
        if is_last:
            running = []
        else:
            running = [one for one in best if one not in stopped][: self._width]
        if not running or not self._can_improve(running[0], length):
            return None
        running += [Candidate(running[0].beam, running[0].token, -math.inf)] * (self._width - len(running))
        self._logprobs = [one.logprob for one in running]
        return running

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _is_stopped(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._group.stop_ids:
            return True
        stop = self._params.stop
        least = self._params.min_tokens
        return bool(stop) and self._detokenizer.completes_stop(tokens, least)

    def _best(self, logprobs: Tensor) -> list[Candidate]:
        """Return the best continuations of all beams: enough for `width` of them to go on."""
        total = (logprobs + torch.tensor(self._logprobs, device=logprobs.device)[:, None]).flatten()
        count = max(2, 1 + len(self._group.stop_ids)) * self._width
        values, places = total.topk(min(count, len(total)))
        vocab = logprobs.shape[1]
        return [
            Candidate(place // vocab, place % vocab, value)
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
            if value > -math.inf
        ]

    def _can_improve(self, best: Candidate, length: int) -> bool:
        """Return whether a running beam may still become better than the worst finished output."""
        if len(self.finished) < self._width:
            return True
        early = self._params.early_stopping
        if early is True:
            return False
        if early == "never" and self._params.length_penalty > 0:
            longest = self._max_tokens
        else:
            longest = length
        return self._score(best.logprob, longest) > self.finished[-1].score


def advance_beams(
    sampled: SamplerOutput, batch: Batch, blocks: BlockManager, processor: LogitPostProcessor
) -> dict[SequenceGroup, list[Hypothesis]]:
    """Continue each beam of a step from the beam that its search chooses: output, blocks and matcher. Returns the
    searches that have ended: free them, then call `show_result`."""
    groups: dict[SequenceGroup, dict[Sequence, int]] = {}
    for place, row in enumerate(batch.beams):
        sequence = batch.sequences[row]
        if row not in sampled.unsampled and not sequence.is_finished():
            groups.setdefault(sequence.group, {})[sequence] = place
    ended: dict[SequenceGroup, list[Hypothesis]] = {}
    for group, places in groups.items():
        group.search = group.search or BeamSearch(group)
        if not _advance(group, [places[one] for one in group.sequences], sampled, blocks, processor):
            ended[group] = group.search.finished
    return ended


def _advance(
    group: SequenceGroup, rows: list[int], sampled: SamplerOutput, blocks: BlockManager, processor: LogitPostProcessor
) -> bool:
    """Continue one search. `rows` are those of its beams. Returns False if it has ended."""
    beams = group.sequences
    count = group.sampling_params.logprobs
    assert sampled.beam_scores is not None
    group.first_token_time = group.first_token_time or time.monotonic()
    outputs = [one.output_token_ids[:] for one in beams]
    logprobs = [one.record.logprobs[:] for one in beams]
    chosen = group.search.advance(sampled.beam_scores[rows], outputs)

    def scored(one: Candidate) -> list[TokenLogprobs]:
        if count is None:
            return []
        assert sampled.beam_logprobs is not None
        row = sampled.beam_logprobs[rows[one.beam]]
        return logprobs[one.beam] + ranked_logprobs(row[None], row.new_tensor([one.token]).long(), [count])

    for one in group.search.finished:
        if len(one.tokens) > len(outputs[0]):  # finished in this step
            one.logprobs = scored(one.candidate)
    if chosen is None:
        return False
    ids = [one.seq_id for one in beams]
    blocks.take_over({ids[own]: ids[one.beam] for own, one in enumerate(chosen) if own != one.beam})
    for own, sequence, candidate in zip(outputs, beams, chosen, strict=True):
        output = outputs[candidate.beam]
        if own != output and sequence.view is not None:
            same = next(place for place, (a, b) in enumerate(zip(own, output, strict=True)) if a != b)
            processor.rollback(sequence.seq_id, same)
        sequence.take_over([*output, candidate.token], candidate.logprob, scored(candidate))
    return True


def show_result(group: SequenceGroup, finished: list[Hypothesis]) -> None:
    """Replace the sequences of a search that has ended by its finished outputs, best first."""
    for sequence in group.sequences:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
    del group.sequences[max(1, len(finished)) :]
    for sequence, one in zip(group.sequences, finished, strict=False):
        sequence.take_over(one.tokens, one.candidate.logprob, one.logprobs)
        sequence.status = SequenceStatus.RUNNING
        sequence.end_if_complete()
