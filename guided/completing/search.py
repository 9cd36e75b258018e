"""Completions: short texts after which the constraint is satisfied, and masks that leave room for one.

The search follows the bytes that probably end the output soonest, one single-byte token at a time. The text that it
finds is then encoded by the tokenizer, which takes fewer tokens. The grammar library has accepted each token of a
completion.

After every token, one completion of the sequence is known. While the budget has room for this completion and for what
one more token can add to it (`budget.py`), the mask stays unchanged. After that, the mask allows a token only if a
completion after this token is known and fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, pack
from guided.completing.budget import Budget
from guided.errors import GuidedError, InvalidRequest
from guided.vocabulary import Vocabulary, valid_utf8

_PATIENCE = (64, 2)
"""Number of uses of a byte after which other bytes are preferred: in the first attempt, and in all later ones."""
_CLOSING = b"}])>\"'"
_STRUCTURE = _CLOSING + b",:;=0123456789Z-+.a"
"""Bytes to try first where structure is expected, in this order."""
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
        self._decode = vocabulary.decode
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
        # Bytes to try first within text, in this order.
        self._ranks = tuple(np.array([_rank(order, byte) for byte in spelled]) for order in (_STRUCTURE, b'" -0aA'))
        self._closing = np.array([byte in _CLOSING for byte in spelled], np.bool_)
        self._mark = spelled.index(_MARK) if _MARK in spelled else -1

    def permitting(self, permitted: NDArray[np.int32]) -> Completions:
        """Return a copy with other permitted tokens, such as special tokens of a structural tag. Shares all tables."""
        shared = copy(self)
        shared._permitted = permitted
        return shared

    def first(self, matcher: Matcher, hint: str) -> Completion | None:
        """Search for a short output: the completion of the empty output."""
        if matcher.is_accepting():
            return Completion(b"", ())
        hinted = self.checked(matcher, hint.encode()) if hint else None
        # Maximum number of tokens that the search for a sequence's first completion tries.
        found = hinted or self.find(matcher, Steps(4000))
        return found and self._shortened(matcher, found)

    def _shortened(self, matcher: Matcher, found: Completion) -> Completion:
        """Leave out members of JSON objects, one by one, where the matcher accepts the rest."""
        try:
            value = json.loads(found.text)
        except ValueError:  # other text
            return found
        parts = [value]
        for part in parts:  # grows
            for name in list(part) if isinstance(part, dict) else ():
                members = dict(part)
                del part[name]
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                shorter = self.checked(matcher, text.encode())
                if shorter is None:
                    part.clear()
                    part.update(members)
                found = shorter or found
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return found

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
        text = self._decode(tokens)
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
            return Completion(known.text[len(self._decode([token])) :], known.tokens[1:])
        for text in _rests(known.text, self._decode([token])):
            found = self.checked(matcher, text)
            if found is not None:
                return found
        return None


class BudgetedSequence:
    """The completions of one sequence, after each of its output tokens.

    The state depends only on the output and the budget, so a replay and a rollback restore the same masks.
    """

    def __init__(self, completions: Completions, budget: Budget) -> None:
        self._completions = completions
        self._budget = budget
        self._known: list[Completion | None] = []
        """Completion by number of output tokens. None: no completion was found."""
        self.steered = False
        """A mask was restricted."""

    def roll_back(self, length: int) -> None:
        """Forget what comes after the first `length` output tokens."""
        del self._known[length + 1 :]

    def accept(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Have the matcher accept tokens, and find a completion after each. Raises as `Matcher.accept_tokens` does."""
        self._start(matcher)
        for token in tokens:
            known, left = self._known[-1], self._budget.tokens - len(self._known)
            matcher.accept_tokens([token])
            found: Completion | None = Completion(b"", ())
            if not (matcher.is_terminated() or matcher.is_accepting()):
                found = None if known is None else self._completions.inherited(matcher, known, token)
                if found is None or len(found.tokens) >= left:
                    # Maximum number of tokens that the search for the completion after one output token tries.
                    searched = self._completions.find(matcher, Steps(160))
                    found = min(filter(None, (found, searched)), key=lambda each: len(each.tokens), default=None)
            self._known.append(found)

    def _start(self, matcher: Matcher) -> None:
        """Find the completion of the empty output.

        Raises:
            InvalidRequest: the budget can't suffice, or no completion was found.
        """
        if self._known:
            return
        least = self._completions.first(matcher, self._budget.hint)
        if least is None:
            raise InvalidRequest("no short answer to this constraint was found: leave out complete", param="complete")
        needed = len(least.tokens) + 1
        if needed > self._budget.tokens:
            raise InvalidRequest(
                f"max_tokens is {self._budget.tokens}, and the shortest complete answer that was found takes {needed} "
                f"tokens with its stop token: give at least {needed}",
                param="max_tokens",
            )
        self._known.append(least)

    def restrict(self, matcher: Matcher, row: NDArray[np.int32]) -> None:
        """Clear the bits of tokens after which no known completion fits.

        Args:
            row: int32 `[words]`: the allowed text tokens.
        """
        self._start(matcher)
        budget, known, position = self._budget, self._known[-1], len(self._known) - 1
        if known is None:
            return
        left = budget.tokens - position - 1  # output tokens that may follow the next one
        spare = left - 1 - len(known.tokens)
        if spare >= (budget.jump if position else budget.first_jump):
            return
        kept = np.zeros_like(row)
        if spare >= budget.text_jump and not (self._completions.short & ~row).any():
            samples = self._completions.samples  # they do not fit if the known completion goes on within the string
            if len(list(self._fitting(matcher, samples, known, left, Steps(0)))) == len(samples):
                kept |= self._completions.plain & row
        candidates = self._candidates(row & ~kept, known)
        # Maximum number of tokens that the searches for one mask try, for all candidates together.
        fitting = list(self._fitting(matcher, candidates, known, left, Steps(120)))
        if not (fitting or kept.any() or matcher.is_accepting()):
            fitting = list(known.tokens[:1])  # no completion fits any more: end as soon as possible
        kept |= pack(fitting, len(row) * 32) & row
        if (kept != row).any():
            self.steered = True
            row[:] = kept

    def _candidates(self, row: NDArray[np.int32], known: Completion) -> list[int]:
        """Return the tokens to try: that of the known completion, then the shortest."""
        ids = allowed_ids(row)
        # Maximum number of tokens that are tried as the next one. A restricted mask forbids all others.
        order = np.argsort(self._completions.lengths[ids], kind="stable")[:40]
        return list(dict.fromkeys([*known.tokens[:1], *ids[order].tolist()]))

    def _fitting(
        self, matcher: Matcher, candidates: Sequence[int], known: Completion, left: int, steps: Steps
    ) -> Iterator[int]:
        """Yield the candidates with a known completion of fewer than `left` tokens."""
        if left < 1:
            return
        texts = list[bytes]()
        completions = self._completions
        for token in candidates:
            try:
                trial = matcher.fork()
                trial.accept_tokens([token])
                if trial.is_accepting():
                    yield token
                    continue
            except GuidedError:
                continue
            found = completions.inherited(trial, known, token)
            found = found or next(filter(None, (completions.checked(trial, text) for text in texts)), None)
            if found is None and steps.left > 0:
                found = completions.find(trial, steps)
                # A few of the completions found are tried for the following candidates.
                texts += [] if found is None or len(texts) >= 4 else [found.text]
            if found is not None and len(found.tokens) < left:
                yield token


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
    # Maximum number of bytes at the beginning of the known completion that a new token may make superfluous.
    for skipped in range(min(6, len(known)) + 1):
        yield known[skipped:]
    for joint in (b",", b'",'):  # texts that may be missing between a new token and the known completion
        yield joint + known
