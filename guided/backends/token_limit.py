"""A limit on the tokens of free text at the beginning of an output: the thinking phase.

Once the text has reached the limit and ends with a whole character, the mask allows only the tokens of the literal that
ends the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import pack
from guided.errors import UnsupportedConstraint
from guided.structural_tag import FreeText, Node, Series, Text, Times, has_limit
from guided.vocabulary import Vocabulary, valid_utf8


def limited(grammar: CompiledGrammar, vocabulary: Vocabulary, node: Node) -> CompiledGrammar:
    """Return `grammar` of a structural tag with the limit of its free text, if there is one.

    Raises:
        UnsupportedConstraint: the limit is not at the beginning of the output, or no literal ends the text.
    """
    if not has_limit(node):
        return grammar
    items = _flat(node)
    begin = ""
    while items and isinstance(items[0], Text):
        begin, items = begin + items[0].text, items[1:]
    match items:
        case [FreeText(_, int(limit)), Text(end), *rest] if end and not any(map(has_limit, rest)):
            return LimitedGrammar(grammar, vocabulary, begin, limit, end)
    raise UnsupportedConstraint(
        "max_tokens can be enforced on the text at the beginning of an output only, and if literal text ends it",
        param="structural_tag",
    )


def _flat(node: Node) -> list[Node]:
    """Return the items of a series. A first item that is optional counts as present."""
    match node:
        case Series(items):
            return [inner for item in items for inner in _flat(item)]
        case Times(item, _, 1):
            return _flat(item)
    return [node]


_REST_OF_CHARACTER = 3
"""Maximum number of tokens that complete a character. A text can exceed its limit by this many tokens."""


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
        self.special_token_ids = inner.special_token_ids

    def matcher(self) -> Matcher:
        return _LimitedMatcher(self, self._inner.matcher(), [])

    def dump(self) -> bytes:
        return self._inner.dump()

    def missing(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must come after `tokens`: the end of the text, if it has reached its limit."""
        start = self._length(self.begin, tokens)
        count = 0 if start is None else len(tokens) - start
        if start is None or not self.limit <= count <= self.limit + len(self.end) + _REST_OF_CHARACTER:
            return []  # too early, or over
        decode = self.vocabulary.decode
        cuts = range(start + self.limit, start + min(count, self.limit + _REST_OF_CHARACTER) + 1)
        cut = next((cut for cut in cuts if valid_utf8(text := decode(tokens[start:cut])) == len(text)), None)
        if cut is None:
            return []
        if isinstance(self.end, list):
            return [] if self.end[0] in tokens[start : cut + 1] else self.end
        spelled = decode(tokens[cut:])
        if self.end in decode(tokens[start:cut]) or not self.end.startswith(spelled):
            return []
        return self.vocabulary.encode(self.end[len(spelled) :])

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

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        accepting = self._inner.fill_bitmask(row)
        missing = self._grammar.missing(self._tokens)
        if missing:
            np.bitwise_and(row, pack(missing[:1], self._grammar.vocabulary.padded_vocab_size), out=row)
        return accepting

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
