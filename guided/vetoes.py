"""Vetoes: a sampled token that violates a keyword that is only checked is taken back, and forbidden at its place.

The token that was sampled is checked, not each one that could be. After a veto, the mask of the place before lacks the
token. After several within one value, or where no token is left, the output goes back to the first place in the value
at which another text is possible; each value once. No token is taken back that may have been sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guided.sequence import VetoReport
from guided.tags.follower import Follower, OpenValue, Violation
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from guided.backends.checked import CheckedMatcher

MAX_VETOES, MAX_OF_VALUE = 64, 16
"""Vetoes of one output, and within one of its values."""
_PATIENCE = 4
"""Vetoes within a value after which the output goes back to the value's beginning."""
MAX_HELD = 64
"""Maximum number of tokens that are held back because they may be taken back."""


class Vetoes:
    """The vetoes of one sequence. It is one of the rules that the worker applies to the sequence's masks."""

    def __init__(self, matcher: CheckedMatcher, vocabulary: Vocabulary, final: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._output = b""
        self._ends: list[int] = [0]
        """The number of bytes after each number of tokens."""
        self._open: list[tuple[Follower, OpenValue] | None] = [None]
        """After each number of tokens: the content that is being written."""
        self._forbidden: dict[int, NDArray[np.int32]] = {}
        """By number of tokens: masks of the tokens that must not follow."""
        self._counts: Counter[int] = Counter()
        """Vetoes within a value, by the token in which it began."""
        self._restarted: set[int] = set()
        self._total = 0
        self.final = final
        """So many tokens are never taken back: they may have been sent."""
        self._last: Violation | None = None
        """The newest veto."""
        self._nothing = np.zeros_like(vocabulary.text_mask)
        begun = matcher.open_content()
        if begun is not None:
            follower = Follower(*begun)
            self._open[0] = follower, follower.start(0)

    def restrict(self, output: Sequence[int], row: NDArray[np.int32], accepting: bool) -> None:
        """See `OutputRule.restrict`."""
        forbidden = self._forbidden.get(len(output))
        if forbidden is not None:
            row &= ~forbidden

    def follow(self, token: int) -> Violation | None:
        """Read the next token, before the matcher accepts it. Returns why it must not follow; it is not added then."""
        number, at = len(self._ends) - 1, len(self._output)
        self._output += self._vocabulary.spelled([token])
        content = self._open[-1]
        if content is not None:
            top, violation = content[0].read(content[1], self._output, at, number)
            if violation is not None and number >= self.final:
                self._output = self._output[:at]
                return violation
            content = None if top is None else (content[0], top)
        self._ends.append(len(self._output))
        self._open.append(content)
        return None

    def look_for_content(self) -> Violation | None:
        """Find out whether a content has begun in the newest token, which the matcher has accepted."""
        if self._open[-1] is not None:
            return None
        begun = self._matcher.open_content()
        if begun is None:
            return None
        beginnings, begin = begun
        follower, number = Follower(beginnings, begin), len(self._ends) - 2
        top, violation = follower.read(follower.start(number), self._output, begin, number)
        self._open[-1] = None if top is None else (follower, top)
        return violation if number >= self.final else None

    def roll_back(self, length: int) -> None:
        """Forget the tokens after the first `length`, and what was forbidden after them."""
        self._output = self._output[: self._ends[length]]
        del self._ends[length + 1 :], self._open[length + 1 :]
        for numbers in (self._forbidden, self._counts):
            for number in [number for number in numbers if number > length]:
                del numbers[number]
        self._restarted = {number for number in self._restarted if number <= length}

    def add(self, violation: Violation) -> None:
        """Forbid the token that would have followed.

        Raises `ConstraintNotMet` where the output has to go back further, or there were too many vetoes.
        """
        self._last = violation
        self._total += 1
        self._counts[violation.token] += 1
        count = self._counts[violation.token]
        if count > MAX_OF_VALUE:
            self._total = MAX_VETOES + 1
        self.forbidden = self.forbidden | self._vocabulary.beginning_with(violation.beginnings)
        if self.is_over or (count == _PATIENCE and self._can_restart):
            raise violation.error

    @property
    def is_over(self) -> bool:
        """Whether there were too many vetoes."""
        return self._total > MAX_VETOES

    @property
    def _can_restart(self) -> bool:
        """Whether the output may go back to the beginning of the value of the newest veto."""
        last = self._last
        return last is not None and last.token >= self.final and last.token not in self._restarted

    def restart(self) -> int:
        """Return the number of tokens before the value of the newest veto, if the output may go back to it; if not,
        that of all tokens. It counts as a veto."""
        self._total += 1
        if self._last is None or not self._can_restart:
            return len(self._ends) - 1
        self._restarted.add(self._last.token)
        return self._last.token

    @property
    def forbidden(self) -> NDArray[np.int32]:
        """The mask of the tokens that must not follow: int32 `[words]`."""
        return self._forbidden.get(len(self._ends) - 1, self._nothing)

    @forbidden.setter
    def forbidden(self, mask: NDArray[np.int32]) -> None:
        self._forbidden[len(self._ends) - 1] = mask

    def along(self, text: bytes) -> NDArray[np.int32]:
        """Return the mask of the tokens with which the output would go on like `text`."""
        return self._vocabulary.along(text)

    def text(self, start: int) -> bytes:
        """Return the text of the tokens from number `start` on."""
        return self._output[self._ends[start] :]

    def report(self) -> VetoReport:
        """Return what the engine has to know, once a mask is written."""
        length, content = len(self._ends) - 1, self._open[-1]
        held_from = None if content is None else content[1].held_from
        self.final = max(self.final, length if held_from is None else held_from, length - MAX_HELD)
        return VetoReport(length, self.final, "" if self._last is None else self._last.error.keyword)
