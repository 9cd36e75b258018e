"""Vetoes: a sampled token that violates a keyword that is only checked is taken back,
and forbidden at its place.

The token that was sampled is checked, not each one that could be. After a veto, the
mask of the place before lacks the token. After several of one value, and where no token
is left, the output goes back: to the beginning of the value or of its newest member, or
the last place before at which another text is possible. No token is taken back that may
have been sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from guided.bitmask import Bitmask
from guided.errors import ConstraintNotMet, DeadEnd
from guided.masks.follower import BLANKS, Follower, Violation
from guided.masks.slot_state import SlotState
from guided.sequence import VetoReport
from guided.vocabulary import TokenIds, Vocabulary

if TYPE_CHECKING:
    from guided.backends.checked import CheckedMatcher

MAX_VETOES = 64
"""Vetoes of one output. With half or twice as many, hardly another answer ends
valid."""
_PATIENCE = 4
"""After so many vetoes of one value, the output goes back to where the value may be
written in another way."""
MAX_HELD = 64
"""Maximum number of tokens that are held back because they may be taken back."""


class VetoedSlot(SlotState):
    """A sequence of which tokens may be taken back. It is one of the rules of its own
    masks."""

    matcher: CheckedMatcher

    def begin(self, vocabulary: Vocabulary, final: int) -> None:
        """Start with the first `final` tokens, which are never taken back: they may
        have been sent."""
        self._vocabulary = vocabulary
        self._final = final
        self._follower: Follower | None = None
        """Follows the content that is being written."""
        self._forbidden: dict[int, Bitmask] = {}
        """Number of output tokens -> mask of the tokens that must not follow."""
        self._counts: Counter[int] = Counter()
        """Vetoes of values, by the token in which they, or their newest members, began.
        -1: times that it went back."""
        self._last: Violation | None = None
        """The newest veto."""
        self._look_for_content()

    def restrict(self, output: TokenIds, row: Bitmask, accepting: bool) -> None:
        """Clear the bits of forbidden tokens: before the budget looks for others, and
        after it."""
        forbidden = self._forbidden.get(len(output))
        if forbidden is not None:
            row &= ~forbidden

    def report(self) -> VetoReport:
        """Return what the engine has to know, once a mask is written."""
        length = len(self.tokens)
        final = length
        if self._follower is not None and self._follower.held_from is not None:
            final = max(self._follower.held_from, length - MAX_HELD)
        self._final = max(self._final, final)
        keyword = ""
        if self._last is not None:
            keyword = self._last.error.keyword
        return VetoReport(length, self._final, keyword)

    def accept(self, tokens: TokenIds) -> None:
        """Accept new tokens up to the first one that violates the schema, and forbid
        that one.

        Raises `ConstraintNotMet` where the output has to go back further, or there were
        too many vetoes.
        """
        for token in tokens:
            if self._follower is not None:
                violation = self._follower.read(
                    self._vocabulary.token_bytes[token], len(self.tokens)
                )
                if violation is not None:
                    self._veto(token, violation)
                    break
            super().accept([token])
            if self._follower is None or self._follower.is_over:
                self._look_for_content()
        if (
            self._last is not None
            and self._follower is not None
            and self._follower.has_pattern
        ):
            characters = self._follower.characters()
            if characters:  # the string goes on by single ones
                self._forbid(
                    self._vocabulary.text_mask
                    & ~self._vocabulary.spelled_like(characters)
                )

    def _veto(self, token: int, violation: Violation) -> None:
        self._last = violation
        start = violation.token
        self._look_for_content()
        self._forbid(self._vocabulary.mask([token]))
        self._forbid(self._vocabulary.beginning_with(violation.beginnings))
        self._counts[start] += 1
        goes_back = self._counts[start] % _PATIENCE == 0 and self._final <= start < len(
            self.tokens
        )
        if goes_back or self._counts.total() > MAX_VETOES:
            raise violation.error

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        for number in [number for number in self._forbidden if number > length]:
            del self._forbidden[number]
        self._look_for_content()

    def _look_for_content(self) -> None:
        """Read the content that the output ends in."""
        self._follower = None
        begun = self.matcher.open_content()
        if begun is not None:
            schema, begin = begun
            self._follower = Follower(schema)
            for number, token in enumerate(self.tokens):
                text = self._vocabulary.spelled([token])
                self._follower.read(text[max(0, begin) :], number)
                begin -= len(text)
            self._follower.validates = True

    def _forbid(self, tokens: Bitmask) -> None:
        """Forbid a mask of tokens after the output."""
        if not self._forbidden:
            self.rules = [*self.grammar.rules, self]
        length = len(self.tokens)
        self._forbidden[length] = tokens | self._forbidden.get(length, 0)

    def retries(self) -> Iterator[None]:
        """Go back to where the output may go on in another way, and forbid the tokens
        that go on as it did."""
        self._counts[-1] += 1
        if self._counts.total() > MAX_VETOES or not isinstance(
            self.error, ConstraintNotMet | DeadEnd
        ):
            return
        tokens = list(self.tokens)
        start = len(tokens) - 1
        if self._last is not None:
            self.error = self._last.error
            if self._final <= self._last.token < start:
                start = (
                    self._last.token
                    + 2
                    - max(1, self._counts[self._last.token] // _PATIENCE)
                )
        for length in range(start, self._final - 1, -1):
            self.roll_back(length)
            text = self._vocabulary.spelled(tokens[length:])
            self._forbid(
                self._vocabulary.beginning_with(
                    [text.lstrip()[:1] or text[:1], *BLANKS]
                )
            )
            yield
