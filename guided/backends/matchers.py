"""Matchers for libraries that lack a part of the contract.

`TextMatcher` adds stop tokens. `StateMatcher` adds rollback and fork, for libraries with immutable states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.errors import BackendError, TokenRejected
from guided.vocabulary import Vocabulary


class TextMatcher(Matcher):
    """A matcher that handles stop tokens itself, for libraries that get text tokens only."""

    def __init__(self, vocabulary: Vocabulary, terminated: bool) -> None:
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._terminated = terminated

    @abstractmethod
    def accept_text(self, token_ids: list[int]) -> None:
        """Advance by tokens that are no stop tokens. Raises as `accept_tokens` does."""

    @abstractmethod
    def rollback_text(self, count: int) -> None:
        """Take back the last `count` text tokens, at least one."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if self._terminated and token_ids:
            raise TokenRejected("the sequence is over: a stop token was accepted")
        text = list(token_ids)
        stop = text.pop() if text and text[-1] in self._stop_token_ids else None
        if not self._stop_token_ids.isdisjoint(text):
            raise TokenRejected("a stop token before the end of the sequence")
        if text:
            self.accept_text(text)
        if stop is not None:
            if not self.is_accepting():
                raise TokenRejected(f"stop token {stop} is not allowed here: the constraint is not satisfied")
            self._terminated = True

    def rollback(self, count: int) -> None:
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count:
            self.rollback_text(count)

    def is_terminated(self) -> bool:
        return self._terminated


class StateGrammar(CompiledGrammar, Protocol):
    """A compiled grammar as an automaton over tokens. Stop tokens are not part of it."""

    vocabulary: Vocabulary
    start: Any
    accepts_empty: bool
    """The empty output satisfies the constraint, whether `start` is final or not."""

    def next_state(self, state: Any, token: int) -> Any | None:
        """Return the state after `token`; None if it is not allowed."""

    def is_final(self, state: Any) -> bool:
        """Whether an output that ends in `state` satisfies the constraint."""

    def mask(self, state: Any) -> NDArray[np.int32]:
        """Return the mask of the tokens allowed in `state`: int32 `[words]`, read-only."""

    def matcher(self) -> Matcher:
        return StateMatcher(self, [self.start])


class StateMatcher(TextMatcher):
    """One sequence: the states after each of its text tokens."""

    def __init__(self, grammar: StateGrammar, states: list[Any], terminated: bool = False) -> None:
        super().__init__(grammar.vocabulary, terminated)
        self._grammar = grammar
        self._states = states

    def accept_text(self, token_ids: list[int]) -> None:
        for token in token_ids:
            state = self._grammar.next_state(self._states[-1], token)
            if state is None:
                raise TokenRejected(f"token {token} is not allowed here")
            self._states.append(state)

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        row[:] = self._grammar.mask(self._states[-1])
        return self.is_accepting()

    def rollback_text(self, count: int) -> None:
        if count >= len(self._states):
            raise BackendError(f"can't take back {count} of {len(self._states) - 1} tokens")
        del self._states[-count:]

    def fork(self) -> StateMatcher:
        return StateMatcher(self._grammar, list(self._states), self._terminated)

    def is_accepting(self) -> bool:
        empty = self._grammar.accepts_empty and len(self._states) == 1
        return empty or self._grammar.is_final(self._states[-1])
