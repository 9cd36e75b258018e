"""Completion within a budget: the mask forbids tokens after which no known completion would fit.

After every token, one completion of the sequence is known. While the budget has room for this completion and for what
one more token can add to it (`budget.py`), the mask stays unchanged. After that, the mask allows a token only if a
completion after this token is known and fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, pack
from guided.completing.budget import Budget
from guided.completing.search import Completion, Completions, Steps
from guided.errors import GuidedError, InvalidRequest

_LATER_STEPS = 160
"""Maximum number of tokens that the search for the completion after one output token tries."""
_MASK_STEPS = 120
"""Maximum number of tokens that the searches for one mask try, for all candidates together."""
_CANDIDATES = 40
"""Maximum number of tokens that are tried as the next one. A restricted mask forbids all others."""
_SHARED = 4
"""Maximum number of completions found for one candidate that are then tried for the following candidates."""


class BudgetedSequence:
    """The completions of one sequence, after each of its output tokens.

    The state depends only on the output and the budget, so a replay and a rollback restore the same masks.
    """

    def __init__(self, completions: Completions, budget: Budget) -> None:
        self._completions = completions
        self._budget = budget
        self._known: list[Completion | None] = []
        """Completion by number of output tokens. None: no completion was found."""
        self.steered = False
        """A mask was restricted."""

    def fork(self, budget: Budget) -> BudgetedSequence:
        """Return a copy for a sequence with the same output so far."""
        copy = BudgetedSequence(self._completions, budget)
        copy._known, copy.steered = list(self._known), self.steered
        return copy

    def roll_back(self, length: int) -> None:
        """Forget what comes after the first `length` output tokens."""
        del self._known[length + 1 :]

    def accept(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Have the matcher accept tokens, and find a completion after each. Raises as `Matcher.accept_tokens` does."""
        self._start(matcher)
        for token in tokens:
            known, left = self._known[-1], self._budget.tokens - len(self._known)
            matcher.accept_tokens([token])
            found: Completion | None = Completion(b"", ())
            if not (matcher.is_terminated() or matcher.is_accepting()):
                found = None if known is None else self._completions.inherited(matcher, known, token)
                if found is None or len(found.tokens) >= left:
                    searched = self._completions.find(matcher, Steps(_LATER_STEPS))
                    found = min(filter(None, (found, searched)), key=lambda each: len(each.tokens), default=None)
            self._known.append(found)

    def _start(self, matcher: Matcher) -> None:
        """Find the completion of the empty output.

        Raises:
            InvalidRequest: the budget can't suffice, or no completion was found.
        """
        if self._known:
            return
        least = self._completions.first(matcher, self._budget.hint)
        if least is None:
            raise InvalidRequest("no short answer to this constraint was found: leave out complete", param="complete")
        needed = len(least.tokens) + 1
        if needed > self._budget.tokens:
            raise InvalidRequest(
                f"max_tokens is {self._budget.tokens}, and the shortest complete answer that was found takes {needed} "
                f"tokens with its stop token: give at least {needed}",
                param="max_tokens",
            )
        self._known.append(least)

    def restrict(self, matcher: Matcher, row: NDArray[np.int32]) -> None:
        """Clear the bits of tokens after which no known completion fits.

        Args:
            row: int32 `[words]`: the allowed text tokens.
        """
        self._start(matcher)
        budget, known, position = self._budget, self._known[-1], len(self._known) - 1
        if known is None:
            return
        left = budget.tokens - position - 1  # output tokens that may follow the next one
        spare = left - 1 - len(known.tokens)
        if spare >= (budget.jump if position else budget.first_jump):
            return
        kept = np.zeros_like(row)
        if spare >= budget.text_jump and not (self._completions.short & ~row).any():
            samples = self._completions.samples  # they do not fit if the known completion goes on within the string
            if len(list(self._fitting(matcher, samples, known, left, Steps(0)))) == len(samples):
                kept |= self._completions.plain & row
        candidates = self._candidates(row & ~kept, known)
        fitting = list(self._fitting(matcher, candidates, known, left, Steps(_MASK_STEPS)))
        if not (fitting or kept.any() or matcher.is_accepting()):
            fitting = list(known.tokens[:1])  # no completion fits any more: end as soon as possible
        kept |= pack(fitting, len(row) * 32) & row
        if (kept != row).any():
            self.steered = True
            row[:] = kept

    def _candidates(self, row: NDArray[np.int32], known: Completion) -> list[int]:
        """Return the tokens to try: that of the known completion, then the shortest."""
        ids = allowed_ids(row)
        order = np.argsort(self._completions.lengths[ids], kind="stable")[:_CANDIDATES]
        return list(dict.fromkeys([*known.tokens[:1], *ids[order].tolist()]))

    def _fitting(
        self, matcher: Matcher, candidates: Sequence[int], known: Completion, left: int, steps: Steps
    ) -> Iterator[int]:
        """Yield the candidates with a known completion of fewer than `left` tokens."""
        if left < 1:
            return
        texts = list[bytes]()
        completions = self._completions
        for token in candidates:
            try:
                trial = matcher.fork()
                trial.accept_tokens([token])
                if trial.is_accepting():
                    yield token
                    continue
            except GuidedError:
                continue
            found = completions.inherited(trial, known, token)
            found = found or next(filter(None, (completions.checked(trial, text) for text in texts)), None)
            if found is None and steps.left > 0:
                found = completions.find(trial, steps)
                texts += [] if found is None or len(texts) >= _SHARED else [found.text]
            if found is not None and len(found.tokens) < left:
                yield token
