"""SlotState: the sequence in one slot of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from guided.backends.base import CompiledGrammar, Matcher, OutputRule
from guided.bitmask import Bitmask
from guided.errors import GuidedError
from guided.masks.completing import BudgetedSequence
from guided.vocabulary import TokenIds


@dataclass(slots=True)
class SlotState:
    """The sequence in one slot."""

    permitted: Bitmask
    """Tokens that the sequence's grammar may allow."""
    grammar: CompiledGrammar
    matcher: Matcher | None = None
    rules: Sequence[OutputRule] = ()
    """Applied to each of its masks."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens that the matcher has accepted."""
    edit: tuple[int, TokenIds] | None = None
    """(start, tokens): the output after `start`, to be applied before the next mask."""
    budgeted: BudgetedSequence | None = None
    """Completes the output within its budget, if it has one."""
    error: GuidedError | None = None
    """Why the sequence is over."""

    def accept(self, tokens: TokenIds) -> None:
        """Have the matcher accept new tokens."""
        assert self.matcher is not None
        if self.budgeted is None:
            self.matcher.accept_tokens(tokens)
        else:
            self.budgeted.accept(self.matcher, tokens)
        self.tokens.extend(tokens)

    def roll_back(self, length: int) -> None:
        """Take back the tokens after the first `length`, at least one."""
        assert self.matcher is not None
        self.matcher.rollback(len(self.tokens) - length)
        if self.budgeted is not None:
            self.budgeted.roll_back(length)
        del self.tokens[length:]

    def restrict(self, output: TokenIds, row: Bitmask, accepting: bool) -> None:
        """Restrict the mask after `output`, once all else has: nothing here."""

    def retries(self) -> Iterator[None]:
        """Go back to places from which the sequence may go on after its error; yields
        at each."""
        yield from ()
