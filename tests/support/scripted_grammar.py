"""Grammars for tests. Their languages are finite sets of token sequences."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.errors import BackendError, TokenRejected

STOP = 0
"""The stop token of the vocabularies in these tests."""


class ScriptedMatcher(Matcher):
    """A matcher by the tokens that may follow. Subclasses say which those are, and
    which outputs are complete."""

    stop_ids: Collection[int] = (STOP,)

    def __init__(self, grammar: Any, tokens: list[int]) -> None:
        self.grammar = grammar
        self.tokens = tokens

    def _next(self) -> Collection[int]:
        here = len(self.tokens)
        return {
            s[here]
            for s in self.grammar.sentences
            if s[:here] == self.tokens and len(s) > here
        }

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self.is_terminated() or not (
                token in self._next()
                or (token in self.stop_ids and self.is_accepting())
            ):
                raise TokenRejected(f"token {token} is not allowed here")
            self.tokens.append(token)

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        if self.grammar.fail_at == len(self.tokens):
            raise self.grammar.failure
        allowed = np.zeros(32 * len(row), np.bool_)
        allowed[list(self._next())] = True
        row.view(np.uint8)[:] = np.packbits(allowed, bitorder="little")
        return self.is_accepting()

    def rollback(self, count: int) -> None:
        if count > len(self.tokens):
            raise BackendError("nothing to roll back")
        del self.tokens[len(self.tokens) - count :]

    def fork(self) -> ScriptedMatcher:
        return ScriptedMatcher(self.grammar, list(self.tokens))

    def is_accepting(self) -> bool:
        return self.tokens in self.grammar.sentences

    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.stop_ids

    def forced_tokens(self) -> list[int]:
        found = self._next()
        return list(found) if len(found) == 1 and not self.is_accepting() else []


class ScriptedGrammar(CompiledGrammar):
    """A grammar that accepts exactly `sentences`. Its matchers can fail at a
    position."""

    def __init__(
        self,
        sentences: Sequence[Sequence[int]],
        fail_at: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.failure = failure or ValueError("the library raised")
        self.sentences = [list(sentence) for sentence in sentences]
        self.fail_at = fail_at

    def matcher(self) -> ScriptedMatcher:
        return ScriptedMatcher(self, [])

    def dump(self) -> bytes:
        return b""


class SlowGrammar(ScriptedGrammar):
    """The mask at position `slow_at` comes when `release` is set; `reached` says that
    it was asked for.

    Forks of its matchers are quick.
    """

    def __init__(self, sentences: Sequence[Sequence[int]], slow_at: int) -> None:
        super().__init__(sentences)
        self.slow_at = slow_at
        self.reached = threading.Event()
        self.release = threading.Event()
        self.fills_at: Counter[int] = Counter()
        """Masks that were computed, by position."""

    def matcher(self) -> ScriptedMatcher:
        return _SlowMatcher(self, [])


class _SlowMatcher(ScriptedMatcher):
    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        self.grammar.fills_at[len(self.tokens)] += 1
        if len(self.tokens) == self.grammar.slow_at:
            self.grammar.reached.set()
            assert self.grammar.release.wait(60)
        return super().fill_bitmask(row)
