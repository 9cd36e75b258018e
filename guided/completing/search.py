"""The search for completions: short texts after which the constraint is satisfied.

The search follows the bytes that probably end the output soonest, one single-byte token at a time. The text that it
finds is then encoded by the tokenizer, which takes fewer tokens. The grammar library has accepted each token of a
completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import allowed_ids, pack
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary, valid_utf8

_FIRST_STEPS = 4000
"""Maximum number of tokens that the search for a sequence's first completion tries."""
_SKIPS = 6
"""Maximum number of bytes at the beginning of the known completion that a new token may make superfluous."""
_JOINTS = (b",", b'",')
"""Texts that may be missing between a new token and the known completion."""
_PATIENCE = (64, 2)
"""Number of uses of a byte after which other bytes are preferred: in the first attempt, and in all later ones."""
_CLOSING = b"}])>\"'"
_STRUCTURE = _CLOSING + b",:;=0123456789Z-+.a"
"""Bytes to try first where structure is expected, in this order."""
_TEXT = b'" -0aA'
"""Bytes to try first within text, in this order."""
_MARK = ord("~")
"""A byte that is hardly ever allowed outside text. Where it is allowed, the position counts as text."""


@dataclass
class Steps:
    """How many tokens a search may still try."""

    left: int


class Completion(NamedTuple):
    """A text that satisfies the constraint after the output so far."""

    text: bytes
    tokens: tuple[int, ...]


class Completions:
    """Searches for completions over one vocabulary.

    Args:
        permitted: int32 `[words]`: the text tokens.
    """

    def __init__(self, vocabulary: Vocabulary, permitted: NDArray[np.int32]) -> None:
        self._permitted = permitted
        self._row = np.empty_like(permitted)
        self._bytes = vocabulary.token_bytes
        self._encode = lru_cache(maxsize=4096)(lambda text: tuple(vocabulary.encode(text)))
        ids = vocabulary.text_token_ids
        self.lengths = np.full(len(permitted) * 32, 1 << 30, np.int64)
        self.lengths[list(ids)] = [len(vocabulary.token_bytes[token]) for token in ids]
        never = frozenset(b'"\\') | frozenset(range(32)) | {127}
        plain = (token for token in ids if not never.intersection(vocabulary.token_bytes[token]))
        texts = [token for token in plain if valid_utf8(each := vocabulary.token_bytes[token]) == len(each)]
        self.plain = pack(texts, len(permitted) * 32)
        """int32 `[words]`: tokens that are plain text within a JSON string."""
        self.samples = sorted(texts, key=lambda token: self.lengths[token])[:: max(1, len(texts) - 1)][:2]
        """The shortest and the longest token of `plain`."""
        self.short = pack([token for token in texts if self.lengths[token] <= 2], len(permitted) * 32)
        """int32 `[words]`: tokens of `plain` with one or two bytes. All are allowed only in an unrestricted string."""
        self._singles = _single_bytes(vocabulary)
        self._words, self._bits = self._singles // 32, self._singles % 32
        spelled = [vocabulary.token_bytes[token][0] for token in self._singles.tolist()]
        self._ranks = tuple(np.array([_rank(order, byte) for byte in spelled]) for order in (_STRUCTURE, _TEXT))
        self._closing = np.array([byte in _CLOSING for byte in spelled], np.bool_)
        self._mark = spelled.index(_MARK) if _MARK in spelled else -1

    def permitting(self, permitted: NDArray[np.int32]) -> Completions:
        """Return a copy with other permitted tokens, such as special tokens of a structural tag. Shares all tables."""
        shared = copy(self)
        shared._permitted = permitted
        return shared

    def text_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def first(self, matcher: Matcher, hint: str) -> Completion | None:
        """Search for a short output: the completion of the empty output."""
        if matcher.is_accepting():
            return Completion(b"", ())
        hinted = self.checked(matcher, hint.encode()) if hint else None
        return hinted or self.find(matcher, Steps(_FIRST_STEPS))

    def find(self, matcher: Matcher, steps: Steps) -> Completion | None:
        """Search for a short completion of `matcher`'s state, which does not change."""
        for patience in _PATIENCE:
            found = self._roll_out(matcher, steps.left // 2, patience, steps)
            if found is not None:
                return found
        return None

    def _roll_out(self, matcher: Matcher, most: int, patience: int, steps: Steps) -> Completion | None:
        """Follow the preferred bytes until the constraint is satisfied, for at most `most` tokens."""
        uses = np.zeros(len(self._singles), np.int64)
        tokens: list[int] = []
        try:
            trial = matcher.fork()
            while not trial.is_accepting():
                steps.left -= 1
                following = trial.forced_tokens() or self._choose(trial, uses, patience)
                if len(tokens) + len(following) > most or not following:
                    return None
                trial.accept_tokens(following)
                tokens += following
        except GuidedError:
            return None
        text = b"".join(map(self.text_of, tokens))
        return self.checked(matcher, text) or Completion(text, tuple(tokens))

    def _choose(self, trial: Matcher, uses: NDArray[np.int64], patience: int) -> list[int]:
        """Return the preferred next token; nothing at a dead end."""
        row = self._row
        trial.fill_bitmask(row)
        np.bitwise_and(row, self._permitted, out=row)
        allowed = np.flatnonzero((row[self._words] >> self._bits) & 1)
        if not len(allowed):
            ids = allowed_ids(row)
            shortest: list[int] = ids[np.argsort(self.lengths[ids], kind="stable")[:1]].tolist()
            return shortest
        ranks = self._ranks[1 if self._mark in allowed else 0]
        worn = np.where(self._closing, 0, uses // patience * 1000)
        best = allowed[np.argmin((ranks + worn)[allowed])]
        uses[best] += 1
        return [int(self._singles[best])]

    def checked(self, matcher: Matcher, text: bytes) -> Completion | None:
        """Return `text` as a completion if `matcher` accepts it, in as few tokens as the tokenizer spells it."""
        try:
            trial = matcher.fork()
            tokens = self._encode(text)
            if tokens:
                trial.accept_tokens(tokens)
            return Completion(text, tokens) if trial.is_accepting() else None
        except GuidedError:
            return None

    def inherited(self, matcher: Matcher, known: Completion, token: int) -> Completion | None:
        """Derive a completion after `token`, which `matcher` has accepted, from the one before it."""
        if known.tokens[:1] == (token,):
            return Completion(known.text[len(self.text_of(token)) :], known.tokens[1:])
        for text in _rests(known.text, self.text_of(token)):
            found = self.checked(matcher, text)
            if found is not None:
                return found
        return None


def shortest(vocabulary: Vocabulary, grammar: CompiledGrammar, hint: str) -> Completion | None:
    """Search for a short output of a grammar. `hint`: `Budget.hint`."""
    return Completions(vocabulary, vocabulary.text_mask).first(grammar.matcher(), hint)


def _single_bytes(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the ids of single-byte tokens, one for each byte, ascending."""
    found = {vocabulary.token_bytes[token]: token for token in reversed(vocabulary.text_token_ids)}
    return np.array(sorted(token for content, token in found.items() if len(content) == 1), np.int64)


def _rank(order: bytes, byte: int) -> int:
    """Return the sort key of a byte: bytes in `order`, other characters, opening brackets and backslash, the rest."""
    if byte in order:
        return order.index(byte)
    if byte < 33 or byte > 126:
        return 700 + byte
    return (400 if byte in b"{[(<\\" else 100) + byte


def _rests(known: bytes, new: bytes) -> Iterator[bytes]:
    """Yield texts that may complete an output after `new`, if `known` completed it before."""
    if known.startswith(new):
        yield known[len(new) :]
        return
    for skipped in range(min(_SKIPS, len(known)) + 1):
        yield known[skipped:]
    for joint in _JOINTS:
        yield joint + known
