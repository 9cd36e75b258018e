"""Vetoes: a sampled token that violates a keyword that is only checked is taken back, and forbidden at its place.

The token that was sampled is checked, not each one that could be. After a veto, the mask of the place before lacks the
token. After several within one value, or where no token is left, the output goes back to the first place in the value
at which another text is possible; each value once. No token is taken back that may have been sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guided.schema.beginnings import ANY_OTHER, Patterns
from guided.sequence import VetoReport
from guided.tags.follower import Condition, Follower, OpenValue, Violation
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from guided.backends.checked import CheckedMatcher

MAX_VETOES, MAX_OF_VALUE = 64, 16
"""Vetoes of one output, and within one of its values."""
_PATIENCE = 4
"""Vetoes within a value after which the output goes back to its beginning; after twice as many to before it."""
_CHECK_SECONDS = 0.004
"""Time for the comparison of the tokens that could follow within a string with its pattern."""
_ESCAPED = '"\\/\t\r\b\f'
_OTHERS = [bytes([byte]) for byte in range(0xC2, 0xF5)]
"""The first bytes of characters beyond ASCII."""
_BLANKS = (b" ", b"\n", b"\r", b"\t")
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
        self._back = range(0)
        """See `way_back`."""
        self._strict: list[Patterns] = []
        """Patterns that needed a veto. Strings under them get masks of the tokens that may follow."""
        self.final = final
        """So many tokens are never taken back: they may have been sent."""
        self.last: Violation | None = None
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
        if content is not None and self._strict:
            condition = content[0].condition(content[1], self._output)
            if condition is not None and condition.lists in self._strict:
                self.forbidden = self._against(condition)
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
        self.last = violation
        self.forbidden = self.forbidden | self._vocabulary.beginning_with(violation.beginnings)
        if violation.condition is not None:
            self._strict.append(violation.condition.lists)
            self.forbidden = self.forbidden | self._against(violation.condition)
        self._count(violation.token)
        if self._back or self.is_over:
            raise violation.error

    def _count(self, token: int) -> None:
        """Count a veto in the value that began in a token, and decide whether to go back further."""
        self._total += 1
        self._counts[token] += 1
        if self._counts[token] > MAX_OF_VALUE:
            self._total = MAX_VETOES + 1
        end = len(self._ends) - 1
        if self._counts[token] == _PATIENCE and self.final <= token < end and token not in self._restarted:
            self._restarted.add(token)
            self._back = range(token, end)
        elif self._counts[token] == 2 * _PATIENCE and self.final < token:
            self._back = range(token - 1, self.final - 1, -1)

    def way_back(self) -> range:
        """Return the numbers of tokens after which to look for another text, one after the other.

        They ascend within a value to which the output goes back. They descend where no token is left.
        """
        end, content = len(self._ends) - 1, self._open[-1]
        if not self._back:
            self._count(end if content is None else content[1].token)
        back, self._back = self._back or range(end - 1, self.final - 1, -1), range(0)
        return range(0) if self.is_over else back

    def _against(self, condition: Condition) -> NDArray[np.int32]:
        """Return the mask of the tokens that can't follow within a string: all, or those that are found in time."""
        vocabulary = self._vocabulary
        wrong: list[bytes] = []
        good = [""]
        deadline = time.thread_time() + _CHECK_SECONDS
        for text in good:  # grows
            spelled = condition.begin + text.encode()
            for char in [*vocabulary.characters_after(spelled), ANY_OTHER]:
                if char == '"':
                    is_good = condition.can_end(text)
                elif char == "\\":
                    is_good = any(condition.can_follow(text + escaped) for escaped in _ESCAPED)
                else:
                    is_good = condition.can_follow(text + char)
                if not is_good:
                    wrong += [spelled + byte for byte in (_OTHERS if char == ANY_OTHER else [char.encode()])]
                elif char not in '"\\' + ANY_OTHER:
                    good.append(text + char)
            if time.thread_time() > deadline:
                break
        return vocabulary.beginning_with(wrong)

    @property
    def is_over(self) -> bool:
        """Whether there were too many vetoes."""
        return self._total > MAX_VETOES

    @property
    def forbidden(self) -> NDArray[np.int32]:
        """The mask of the tokens that must not follow: int32 `[words]`."""
        return self._forbidden.get(len(self._ends) - 1, self._nothing)

    @forbidden.setter
    def forbidden(self, mask: NDArray[np.int32]) -> None:
        self._forbidden[len(self._ends) - 1] = mask

    def along(self, text: bytes) -> NDArray[np.int32]:
        """Return the mask of the tokens with which the output would go on like `text`, perhaps after a blank."""
        vocabulary = self._vocabulary
        return vocabulary.along(text) | vocabulary.along(text.lstrip()) | vocabulary.beginning_with(_BLANKS)

    def text(self, start: int) -> bytes:
        """Return the text of the tokens from number `start` on."""
        return self._output[self._ends[start] :]

    def report(self) -> VetoReport:
        """Return what the engine has to know, once a mask is written."""
        length, content = len(self._ends) - 1, self._open[-1]
        held_from = None if content is None else content[1].held_from
        self.final = max(self.final, length if held_from is None else held_from, length - MAX_HELD)
        return VetoReport(length, self.final, "" if self.last is None else self.last.error.keyword)
