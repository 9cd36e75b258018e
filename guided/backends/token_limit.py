"""A limit on the tokens of free text at the beginning of an output: the thinking phase.

Once the text has as many tokens as it may, the mask allows only the tokens that spell the text's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import pack
from guided.structural_tag import Either, FreeText, Node, Series, Text, Times
from guided.vocabulary import Vocabulary


def first_limit(node: Node) -> tuple[str, int, str] | None:
    """Return begin, limit and end of free text with a limit, if an output begins with it; else None."""
    items = _flat(node)
    begin = ""
    while items and isinstance(items[0], Text):
        begin, items = begin + items[0].text, items[1:]
    match items:
        case [FreeText(_, int(limit)), Text(end), *_] if end:
            return begin, limit, end
    return None


def _flat(node: Node) -> list[Node]:
    """Return the items of a series. A first item that is optional counts as present."""
    match node:
        case Series(items):
            return [inner for item in items for inner in _flat(item)]
        case Times(item, _, 1) | Either((item,)):
            return _flat(item)
    return [node]


class LimitedGrammar(CompiledGrammar):
    """A grammar with a limit on the free text at its beginning.

    Args:
        begin: the literal before the text; an output that begins otherwise has no limit.
        limit: maximum number of tokens of the text.
        end: the literal after it.
    """

    def __init__(self, inner: CompiledGrammar, vocabulary: Vocabulary, begin: str, limit: int, end: str) -> None:
        self._inner = inner
        self.vocabulary = vocabulary
        names = vocabulary.special_names
        self.begin = [names[begin]] if begin in names else begin.encode()
        self.end = [names[end]] if end in names else end.encode()
        self.limit = limit
        self.nbytes = inner.nbytes
        self.special_token_ids = inner.special_token_ids

    def matcher(self) -> Matcher:
        return _LimitedMatcher(self, self._inner.matcher(), [])

    def dump(self) -> bytes:
        return self._inner.dump()

    def missing(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must come after `tokens`: the end of the text, if it has reached its limit."""
        start = self._length(self.begin, tokens)
        if start is None or len(tokens) - start < self.limit:
            return []
        if isinstance(self.end, list):
            return [] if self.end[0] in tokens[start : start + self.limit + 1] else self.end
        decode = self.vocabulary.decode
        if self.end in decode(tokens[start : start + self.limit]):
            return []
        spelled = decode(tokens[start + self.limit :])
        return self.vocabulary.encode(self.end[len(spelled) :]) if self.end.startswith(spelled) else []

    def _length(self, begin: bytes | list[int], tokens: Sequence[int]) -> int | None:
        """Return the number of tokens of `begin`, if `tokens` begin with it."""
        if isinstance(begin, list):
            return 1 if list(tokens[:1]) == begin else None
        return next((n for n in range(min(len(tokens), len(begin)) + 1) if self._spells(tokens[:n], begin)), None)

    def _spells(self, tokens: Sequence[int], begin: bytes) -> bool:
        return self.vocabulary.decode(tokens).startswith(begin)


class _LimitedMatcher(Matcher):
    def __init__(self, grammar: LimitedGrammar, inner: Matcher, tokens: list[int]) -> None:
        self._grammar = grammar
        self._inner = inner
        self._tokens = tokens

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self._inner.accept_tokens(token_ids)
        self._tokens.extend(token_ids)

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        self._inner.fill_bitmask(row)
        missing = self._grammar.missing(self._tokens)
        if missing:
            np.bitwise_and(row, pack(missing[:1], self._grammar.vocabulary.padded_vocab_size), out=row)

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        if count:
            del self._tokens[-count:]

    def fork(self) -> Matcher:
        return _LimitedMatcher(self._grammar, self._inner.fork(), list(self._tokens))

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def forced_tokens(self) -> list[int]:
        return self._grammar.missing(self._tokens) or self._inner.forced_tokens()
