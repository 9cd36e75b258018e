"""A grammar library for tests. Its languages are finite sets of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.constraint import Constraint
from guided.errors import BackendError, TokenRejected
from guided.vocabulary import Vocabulary

STOP = 0
"""The stop token of the vocabularies in these tests."""


class ScriptedGrammar(CompiledGrammar):
    """A grammar that accepts exactly `sentences`. Its matchers can fail at a position."""

    def __init__(
        self, sentences: Sequence[Sequence[int]], fail_at: int | None = None, failure: BaseException | None = None
    ) -> None:
        self.failure = failure or ValueError("the library raised")
        self.sentences = [list(sentence) for sentence in sentences]
        self.fail_at = fail_at
        self.opened = 0

    def matcher(self) -> ScriptedMatcher:
        self.opened += 1
        return ScriptedMatcher(self, [])

    def dump(self) -> bytes:
        return b""


class ScriptedMatcher(Matcher):
    def __init__(self, grammar: ScriptedGrammar, tokens: list[int]) -> None:
        self.grammar = grammar
        self.tokens = tokens

    def _next(self) -> set[int]:
        here = len(self.tokens)
        return {s[here] for s in self.grammar.sentences if s[:here] == self.tokens and len(s) > here}

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if (token == STOP and self.is_accepting() and not self.is_terminated()) or token in self._next():
                self.tokens.append(token)
            else:
                raise TokenRejected(f"token {token} is not allowed here")

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        if self.grammar.fail_at == len(self.tokens):
            raise self.grammar.failure
        row[:] = 0
        bits: NDArray[Any] = row.view(np.uint32)
        for token in self._next():
            bits[token // 32] |= np.uint32(1 << (token % 32))
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
        return bool(self.tokens) and self.tokens[-1] == STOP

    def forced_tokens(self) -> list[int]:
        found = self._next()
        return list(found) if len(found) == 1 and not self.is_accepting() else []


class ScriptedBackends:
    """Replaces `Backends`. Compiles a `choice` of digit strings ("123" is the tokens 1, 2, 3)."""

    def __init__(self, vocabulary: Vocabulary, fail_at: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.fail_at = fail_at
        self.compiled: list[str] = []

    def __getitem__(self, name: str) -> ScriptedBackends:
        return self

    def compile(self, constraint: Constraint) -> ScriptedGrammar:
        self.compiled.append(constraint.source)
        return ScriptedGrammar([[int(digit) for digit in text] for text in constraint.choices], self.fail_at)
