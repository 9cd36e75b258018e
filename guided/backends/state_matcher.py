"""A matcher over states that never change, for libraries that have no matcher of their own to be rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.errors import BackendError, TokenRejected
from guided.vocabulary import Vocabulary

__all__ = ["StateGrammar", "StateMatcher"]


class StateGrammar(CompiledGrammar, Protocol):
    """A compiled grammar as an automaton over tokens. Stop tokens are not part of it."""

    vocabulary: Vocabulary
    start: Any
    accepts_empty: bool
    """The empty output satisfies the constraint, whether `start` is final or not."""

    def next_state(self, state: Any, token: int) -> Any | None:
        """The state after `token`; None where it is not allowed."""

    def is_final(self, state: Any) -> bool:
        """Whether an output that ends in `state` satisfies the constraint."""

    def mask(self, state: Any) -> NDArray[np.int32]:
        """The tokens that are allowed in `state`: int32 `[words]`, read-only."""

    def forced(self, state: Any) -> list[int]:
        """The only possible continuation of `state`, which is not final."""

    def matcher(self) -> Matcher:
        return StateMatcher(self, [self.start])


class StateMatcher(Matcher):
    """One sequence: the states after each of its tokens."""

    def __init__(self, grammar: StateGrammar, states: list[Any], terminated: bool = False) -> None:
        self._grammar = grammar
        self._states = states
        self._terminated = terminated

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._terminated:
                raise TokenRejected("the sequence is over: a stop token was accepted")
            if token in self._grammar.vocabulary.stop_token_ids:
                if not self.is_accepting():
                    raise TokenRejected(f"stop token {token} is not allowed here: the constraint is not satisfied")
                self._terminated = True
                continue
            state = self._grammar.next_state(self._states[-1], token)
            if state is None:
                raise TokenRejected(f"token {token} is not allowed here")
            self._states.append(state)

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        row[:] = self._grammar.mask(self._states[-1])

    def rollback(self, count: int) -> None:
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count >= len(self._states):
            raise BackendError(f"can't take back {count} of {len(self._states) - 1} tokens")
        if count:
            del self._states[-count:]

    def fork(self) -> StateMatcher:
        return StateMatcher(self._grammar, list(self._states), self._terminated)

    def is_accepting(self) -> bool:
        empty = self._grammar.accepts_empty and len(self._states) == 1
        return empty or self._grammar.is_final(self._states[-1])

    def is_terminated(self) -> bool:
        return self._terminated

    def forced_tokens(self) -> list[int]:
        return [] if self._terminated or self.is_accepting() else self._grammar.forced(self._states[-1])
