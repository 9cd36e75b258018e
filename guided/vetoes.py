"""Vetoes: a sampled token that violates a keyword that is only checked is taken back, and forbidden at its place.

The token that was sampled is checked, not each one that could be. After a veto, the mask of the place before lacks the
token. After several within one value, the output goes back to the first place in the value at which another text is
possible, once; where no token is left, to the last place before. No token is taken back that may have been sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.errors import ConstraintNotMet, DeadEnd
from guided.sequence import VetoReport
from guided.slot_state import SlotState
from guided.tags.follower import BLANKS, Follower, Violation
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from guided.backends.checked import CheckedMatcher

MAX_VETOES, MAX_OF_VALUE = 64, 16
"""Vetoes of one output, and within one of its values. With half or twice as many, hardly another answer ends valid."""
_PATIENCE = 4
"""After so many vetoes within a value, the output goes back within the value to where another text is possible."""
MAX_HELD = 64
"""Maximum number of tokens that are held back because they may be taken back."""
_GROWING = ("minItems", "minProperties", "minContains", "required")
"""Keywords that more members of an object or array satisfy."""


class VetoedSlot(SlotState):
    """A sequence of which tokens may be taken back. It is one of the rules of its own masks."""

    matcher: CheckedMatcher

    def begin(self, vocabulary: Vocabulary, final: int) -> None:
        """Start with the first `final` tokens, which are never taken back: they may have been sent."""
        self._vocabulary = vocabulary
        self._final = final
        self._follower: Follower | None = None
        """Of the content that is being written."""
        self._forbidden: dict[int, NDArray[np.int32]] = {}
        """By number of tokens: masks of the tokens that must not follow."""
        self._nothing = np.zeros_like(vocabulary.text_mask)
        self._counts: Counter[int] = Counter()
        """Vetoes within a value, by the token in which it began."""
        self._total = 0
        self._last: Violation | None = None
        """The newest veto."""
        self._way_back: Sequence[int] = ()
        """Numbers of tokens after which to look for another text, because there were several vetoes in a value."""
        self.rules = [*self.grammar.rules, self]
        self._look_for_content()

    def restrict(self, output: Sequence[int], row: NDArray[np.int32], accepting: bool) -> None:
        """Clear the bits of forbidden tokens: before the budget looks for others, and after it."""
        forbidden = self._forbidden.get(len(output))
        if forbidden is not None:
            row &= ~forbidden

    def report(self) -> VetoReport:
        """Return what the engine has to know, once a mask is written."""
        length, held_from = len(self.tokens), None if self._follower is None else self._follower.held_from
        self._final = max(self._final, length if held_from is None else held_from, length - MAX_HELD)
        return VetoReport(length, self._final, "" if self._last is None else self._last.error.keyword)

    def accept(self, tokens: Sequence[int]) -> None:
        """Accept new tokens up to the first one that violates the schema, and forbid that one.

        Raises `ConstraintNotMet` where the output has to go back further, or there were too many vetoes.
        """
        for token in tokens:
            violation = self._add(token)
            if violation is not None:
                self._last = violation
                self._forbid(self._vocabulary.beginning_with(violation.beginnings))
                self._forbid(pack([token], self._vocabulary.padded_vocab_size))
                self._count(violation.token, violation.error.keyword not in _GROWING)
                if violation.error.keyword in ("maxProperties", "type"):  # whatever follows the beginning
                    self._way_back = range(violation.token, self._final - 1, -1)
                if self._way_back or self._total > MAX_VETOES:
                    raise violation.error
                break

    def _add(self, token: int) -> Violation | None:
        """Accept a token, or return why it must not follow."""
        if self._follower is not None:
            violation = self._follower.read(self._vocabulary.token_bytes[token], len(self.tokens))
            if violation is not None:
                self._look_for_content()
                return violation
        super().accept([token])
        if self._follower is None or self._follower.is_over:
            self._look_for_content()
        return None

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        for numbers in (self._forbidden, self._counts):
            for number in [number for number in numbers if number > length]:
                del numbers[number]
        self._look_for_content()

    def _look_for_content(self) -> None:
        """Read the content that the output ends in."""
        self._follower = None
        begun = self.matcher.open_content()
        if begun is not None:
            schema, begin = begun
            self._follower, end = Follower(schema), 0
            for number, token in enumerate(self.tokens):
                text = self._vocabulary.spelled([token])
                self._follower.read(text[max(0, begin - end) :], number)
                end += len(text)
            self._follower.validates = True

    def _forbid(self, tokens: NDArray[np.int32]) -> None:
        """Forbid a mask of tokens after the output."""
        length = len(self.tokens)
        self._forbidden[length] = self._forbidden.get(length, self._nothing) | tokens

    def _count(self, token: int, may_restart: bool = True) -> None:
        """Count a veto in the value that began in a token."""
        self._total += 1
        self._counts[token] += 1
        if self._counts[token] > MAX_OF_VALUE:
            self._total = MAX_VETOES + 1
        if may_restart and self._counts[token] == _PATIENCE and token >= self._final:
            self._way_back = [*range(token, len(self.tokens) + 1), *range(token - 1, self._final - 1, -1)]

    def retries(self) -> Iterator[None]:
        """Go back to where another text is possible, with the tokens forbidden that would go on as before."""
        if not isinstance(self.error, ConstraintNotMet | DeadEnd):
            return
        self.error = self.error if self._last is None else self._last.error
        tokens, vetoed, vocabulary = list(self.tokens), dict(self._forbidden), self._vocabulary
        way, self._way_back = self._way_back, ()
        if not way:  # no token is left
            self._count(len(tokens) if self._follower is None else self._follower.token)
            way = range(len(tokens) - 1, self._final - 1, -1)
        for length in way if self._total <= MAX_VETOES else ():
            if length < len(self.tokens):
                self.roll_back(length)
            if any(self._add(token) for token in tokens[len(self.tokens) : length]):
                return
            self._forbid(vetoed.get(length, self._nothing))
            text = vocabulary.spelled(tokens[length:])
            if text:  # another first character, which is no blank
                self._forbid(vocabulary.beginning_with([text[:1], text.lstrip()[:1] or text[:1], *BLANKS]))
            yield
