"""BeamSearch: the state of one request's beam search. It decides as transformers' `generate(num_beams=...)` does."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from engine.logprobs import TokenLogprobs
from engine.sampling_params import SamplingParams


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
    """Beams in lockstep. There are always `width` of them, dead ones included.

    Args:
        max_tokens: length at which every beam ends.
        stop_ids: tokens that end a beam.
        completes_stop: whether an output ends with a stop string.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        stop_ids: Collection[int],
        completes_stop: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.finished: list[Hypothesis] = []
        """Best first, at most `width`."""
        self._width, self._penalty, self._early_stopping = params.width, params.length_penalty, params.early_stopping
        self._max_tokens, self._stop_ids, self._completes_stop = max_tokens, stop_ids, completes_stop
        self._min_tokens = params.min_tokens
        self._logprobs = [0.0] + [-math.inf] * (self._width - 1)  # all beams begin with the same tokens

    def advance(self, logprobs: torch.Tensor, outputs: list[list[int]]) -> list[Candidate] | None:
        """Choose the next beams. None: the search has ended, and `finished` is the result.

        Args:
            logprobs: float32 `[width, vocab]`: log-probabilities of the next token, -inf where it is forbidden.
            outputs: output tokens of each beam.
        """
        length = len(outputs[0]) + 1
        best = self._best(logprobs)
        is_last = length >= self._max_tokens
        stopped = {one for one in best if self._is_stopped(one, outputs[one.beam])}
        ended = [one for one in best[: self._width] if is_last or one in stopped]
        self.finished += [
            Hypothesis(one.logprob / length**self._penalty, one, [*outputs[one.beam], one.token]) for one in ended
        ]
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._width :]
        running = [] if is_last else [one for one in best if one not in stopped][: self._width]
        if not running or not self._can_improve(running[0], length):
            return None
        running += [Candidate(running[0].beam, running[0].token, -math.inf)] * (self._width - len(running))
        self._logprobs = [one.logprob for one in running]
        return running

    def _is_stopped(self, one: Candidate, output: list[int]) -> bool:
        if one.token in self._stop_ids:
            return True
        if self._completes_stop is None or len(output) < self._min_tokens:
            return False
        return self._completes_stop([*output, one.token])

    def _best(self, logprobs: torch.Tensor) -> list[Candidate]:
        """Return the best continuations of all beams: enough for `width` of them to go on."""
        total = (logprobs + torch.tensor(self._logprobs, device=logprobs.device)[:, None]).flatten()
        count = max(2, 1 + len(self._stop_ids)) * self._width
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
        if self._early_stopping is True:
            return False
        longest = self._max_tokens if self._early_stopping == "never" and self._penalty > 0 else length
        return bool(best.logprob / longest**self._penalty > self.finished[-1].score)
