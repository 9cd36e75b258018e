"""TokenRecord: what is recorded of a sequence's output tokens beside their ids, if the
request asks for it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs

Measured = tuple[int, float | None]
"""Number of tokens that a mask allowed, and the log of its kept mass. None: a forced
token, not scored yet."""


@dataclass(slots=True)
class MaskDetails:
    """What the masks of one sequence allowed, for requests with `mask_details` or
    `resample`."""

    allowed: list[int | None] = field(default_factory=list)
    """For each output token: the number of tokens that could be sampled. None: there
    was no mask."""
    forced: list[bool] = field(default_factory=list)
    """For each output token: whether it was appended without a forward pass of its
    own."""
    kept: list[float | None] = field(default_factory=list)
    """For each output token: the log of its kept mass, see `kept_mass`."""
    exposed_seconds: float = 0.0
    """By how much masks have lengthened the sequence's steps."""
    mask_seconds: float = 0.0
    """Seconds that the workers have spent on its masks. Set in snapshots."""

    @property
    def kept_mass(self) -> list[float | None]:
        """For each output token: the probability of all the tokens that its mask
        allowed, in the model's own distribution (before bias and penalties, at
        temperature 1). None: there was no mask, or it is not known yet."""
        return [None if log is None else math.exp(log) for log in self.kept]

    def first(self, count: int) -> MaskDetails:
        """Return a copy for the first `count` output tokens."""
        allowed = self.allowed[:count]
        kept = self.kept[:count]
        kept += [None] * (len(allowed) - len(kept))
        return MaskDetails(allowed, self.forced[:count], kept, self.exposed_seconds)


class TokenRecord:
    """The log-probabilities of output tokens, the details of their masks, and the
    tokens that were taken back. A forced token is recorded later: it is scored by the
    step that computes it."""

    def __init__(self, params: SamplingParams) -> None:
        self.needs_logprobs = params.needs_logprobs
        """Whether log-probabilities of each output token are recorded."""
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        """Sum over the output tokens that have log-probabilities."""
        self.details = MaskDetails() if params.mask_details or params.resample else None
        self.vetoes: Counter[str] = Counter()
        """Number of times that tokens were taken back, by the keyword of the schema
        that they violated."""
        self._is_constrained = params.constraint is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded of single tokens."""
        return not self.needs_logprobs and self.details is None

    def num_scored(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` output tokens have what is wanted
        of them."""
        if self.needs_logprobs:
            num_tokens = len(self.logprobs)
        if self.details is not None:
            num_tokens = min(num_tokens, len(self.details.kept))
        return num_tokens

    def add(self, logprobs: TokenLogprobs | None, measured: Measured | None) -> None:
        """Record the newest token. None: it is scored later, or nothing is wanted."""
        if logprobs is not None:
            self._add_logprobs(logprobs)
        details = self.details
        if details is None or measured is None:
            return
        allowed, kept = measured
        details.forced.append(kept is None)
        if not self._is_constrained:
            details.allowed.append(None)
            details.kept.append(None)
            return
        details.allowed.append(allowed)
        if kept is not None:
            details.kept.append(kept)

    def add_score(self, logprobs: TokenLogprobs, place: int) -> None:
        """Record the log-probabilities of forced token `place`. Its kept mass is its
        own probability."""
        if self.details is not None and len(self.details.kept) == place:
            self.details.kept.append(logprobs.own)
        if self.needs_logprobs and len(self.logprobs) == place:
            self._add_logprobs(logprobs)

    def _add_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.logprobs.append(logprobs)
        self.cumulative_logprob += logprobs.own

    def rollback(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` output tokens."""
        if self.details is not None:
            for column in (
                self.details.allowed,
                self.details.forced,
                self.details.kept,
            ):
                del column[num_tokens:]
        while len(self.logprobs) > num_tokens:
            self.cumulative_logprob -= self.logprobs.pop().own
