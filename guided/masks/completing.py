"""Completions: short texts after which the constraint is satisfied, and masks that
leave room for a completion.

The search follows the bytes that probably end the output soonest, one single-byte token
at a time. The tokenizer then encodes the text of the completion in fewer tokens. The
grammar library has accepted each token of a completion.

After every output token, one completion is known. The *room* is the number of tokens
that the budget leaves beyond it:

- From `_FAR` on, masks stay unchanged.
- From `_NEAR` on, a token is forbidden if the completion after it would not fit. (`{`
  may begin an object with twenty required properties.)
- Below `_NEAR`, a token is allowed only if a completion after it is known and fits.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import Bitmask, allowed_ids
from guided.errors import GuidedError, InvalidRequest
from guided.vocabulary import TokenIds, Vocabulary, valid_utf8

_FAR = 512
_NEAR = 32
_TRIED = 64
"""Maximum number of tokens that are tried for one mask, besides the shortest token with
each first byte."""
_TEXTS = 4
"""Maximum number of completions of one mask that are tried for its other tokens,
too."""
_SEARCH = 400
"""Maximum number of tokens that the searches for one mask, or for the completion after
one output token, try."""
_PATIENCE = (64, 2)
"""Number of uses of a byte after which other bytes are preferred, in the first attempt
and in the second."""
_CLOSING = b"}])>\"'"
"""Bytes that close something. Their use does not count for `_PATIENCE`."""
_STRUCTURE = _CLOSING + b",:;=Z.0123456789-+a"
"""Bytes to try first where structure is expected, in this order."""
_IN_TEXT = b'" -0aA'
"""Bytes to try first within text, in this order."""
_MARKUP = b'"\\<>[]{}'
"""Bytes that may end a text, which is a JSON string or the text before a tag."""
_MARK = ord("~")
"""A byte that is rarely allowed outside of text. A position where it is allowed counts
as text."""


@dataclass
class Steps:
    """The number of tokens that a search may still try."""

    left: int


class Completion(NamedTuple):
    """A text that satisfies the constraint after the output so far."""

    text: bytes
    tokens: tuple[int, ...]


_COMPLETE = Completion(b"", ())
"""The completion of an output that satisfies the constraint."""


class Completions:
    """Searches for completions over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._permitted = vocabulary.text_mask
        self.special = np.zeros_like(self._permitted)
        """Mask of the special tokens that the grammar may allow, int32 `[words]`."""
        self._row = np.empty_like(self._permitted)
        self._literals: Sequence[str] = ()
        self.spelled = vocabulary.spelled
        self.mask = vocabulary.mask
        self._stop = vocabulary.stop_token_ids[0]
        self._encode = lru_cache(maxsize=4096)(
            lambda text: tuple(vocabulary.encode(text))
        )
        ids = vocabulary.text_token_ids
        contents = vocabulary.token_bytes
        self._vocabulary = vocabulary
        self._by_length = np.array(
            sorted(ids, key=lambda token: len(contents[token])), np.int64
        )
        self._first_bytes = np.array(
            [int.from_bytes(content[:1]) for content in contents]
        )
        never = {*_MARKUP, *range(32), 127}
        texts = [token for token in ids if not never.intersection(contents[token])]
        self.text = vocabulary.mask(texts)
        """Mask of the tokens that do not end a text, int32 `[words]`."""
        texts = [
            token
            for token in texts
            if valid_utf8(contents[token]) == len(contents[token])
        ]
        self.plain = vocabulary.mask(texts)
        """Mask of the tokens in `text` with whole characters, int32 `[words]`."""
        texts.sort(key=lambda token: len(contents[token]))
        self.samples = [*texts[:1], *texts[-1:]]
        """The shortest and the longest token of `plain`."""
        self._short = vocabulary.mask(
            [token for token in texts if len(contents[token]) <= 2]
        )
        """Mask of the tokens in `plain` with one or two bytes, int32 `[words]`. Only
        free text allows all of them."""
        self._singles = _single_bytes(vocabulary)
        self._words, self._bits = divmod(self._singles, 32)
        spelled = [contents[token][0] for token in self._singles.tolist()]
        self._ranks = np.array([_rank(_STRUCTURE, byte) for byte in spelled])
        self._text_ranks = np.array([_rank(_IN_TEXT, byte) for byte in spelled])
        self._closing = np.array([byte in _CLOSING for byte in spelled], np.bool_)
        self._mark = -1
        if _MARK in spelled:
            self._mark = spelled.index(_MARK)

    def of(self, grammar: CompiledGrammar) -> Completions:
        """Return a copy for one grammar, with its special tokens and literals. The copy
        shares the other tables."""
        shared = copy(self)
        # a worker's two threads fill rows of different grammars at once
        shared._row = np.empty_like(self._row)
        shared._literals = grammar.literals
        special = grammar.special_token_ids
        names = {
            name.encode(): token
            for name, token in self._vocabulary.special_names.items()
            if token in special
        }
        shared.special = self._vocabulary.mask(special)
        shared._permitted = self._permitted | shared.special
        if names:
            parts = re.compile(b"(" + b"|".join(map(re.escape, names)) + b")")

            def encode(text: bytes) -> tuple[int, ...]:
                tokens: list[int] = []
                for part in parts.split(text):
                    if part in names:
                        tokens.append(names[part])
                    else:
                        tokens += self._encode(part)
                return tuple(tokens)

            shared._encode = lru_cache(maxsize=1024)(encode)
        return shared

    def first(self, matcher: Matcher) -> Completion | None:
        """Search for a short output, which is a completion of the empty output.

        The search tries each first byte, and each literal and pair of literals at the
        beginning.
        """
        if matcher.is_accepting():
            return _COMPLETE
        shortest: Completion | None = None
        for patience in _PATIENCE:
            shortest = _shorter(
                shortest, self._roll_out(matcher, Steps(2000), patience, 1000)
            )
        matcher.fill_bitmask(self._row)
        texts = [literal.encode() for literal in self._literals]
        begun = list(texts)
        if not self.is_free(self._row):
            begun += [
                self.spelled([token])
                for token in self._singles[self._allowed()].tolist()
            ]
        begun += islice(map(b"".join, permutations(texts, 2)), 48)
        steps = Steps(3000)
        for text in begun:
            most = 1000
            if shortest is not None:
                most = len(shortest.text)
            rest = self.find(matcher, steps, most, before=self._encode(text))
            if rest is not None:
                shortest = _shorter(shortest, self.checked(matcher, text + rest.text))
        if shortest is None:
            return None
        used = [
            text.decode()
            for text in begun
            if len(text) > 1 and shortest.text.startswith(text)
        ]
        self._literals = [*sorted(used, key=len, reverse=True), *self._literals]
        return self._shortened(matcher, shortest)

    def shortest(self, row: Bitmask) -> list[int]:
        """Return text tokens of a mask: the shortest tokens, then the shortest token
        with each first byte."""
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        ids = self._by_length[bits[self._by_length] != 0]
        first = np.full(256, -1)
        # the last assignment, of the shortest token, counts
        first[self._first_bytes[ids[::-1]]] = ids[::-1]
        return [*ids[:_TRIED].tolist(), *first[first >= 0].tolist()]

    def beginning_with(self, tokens: TokenIds) -> Bitmask:
        """Return a mask of the tokens that begin with one of `tokens`: int32
        `[words]`."""
        begun = self._vocabulary.beginning_with(
            [self.spelled([token]) for token in tokens]
        )
        return begun | self.mask(tokens)

    def _shortened(self, matcher: Matcher, completion: Completion) -> Completion:
        """Remove members of JSON objects, one by one, if the matcher accepts the
        rest."""
        try:
            value = json.loads(completion.text)
        except ValueError:  # the text is not JSON
            return completion
        parts = [value]
        for part in parts:  # the loop appends to `parts`
            if isinstance(part, list):
                parts += part
            if not isinstance(part, dict):
                continue
            for name in list(part):
                members = dict(part)
                del part[name]
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                shorter = self.checked(matcher, text.encode())
                if shorter is None:
                    part.clear()
                    part.update(members)
                else:
                    completion = shorter
            parts += part.values()
        return completion

    def is_free(self, row: Bitmask) -> bool:
        """Return whether a mask allows text with any characters."""
        return not (self._short & ~row).any()

    def find(
        self,
        matcher: Matcher,
        steps: Steps,
        most: int,
        end: bytes = b"",
        before: TokenIds = (),
    ) -> Completion | None:
        """Search for a short completion after the tokens `before`. `matcher` does not
        change.

        Args:
            most: maximum number of tokens of the search, which are mostly single bytes.
            end: a text with which the completion may end.
        """
        for patience in _PATIENCE:
            completion = self._roll_out(matcher, steps, patience, most, end, before)
            if completion is not None:
                return completion
        return None

    def _roll_out(
        self,
        matcher: Matcher,
        steps: Steps,
        patience: int,
        most: int,
        end: bytes = b"",
        before: TokenIds = (),
    ) -> Completion | None:
        """Follow the preferred bytes until the constraint is satisfied, for at most
        `most` tokens."""
        uses = np.zeros(len(self._singles), np.int64)
        tokens: list[int] = []
        searched = b""  # the mask of a text for which `_end_of_text` found no literal
        try:
            trial = matcher.fork()
            trial.accept_tokens(before)
            while not trial.is_accepting():
                if end and (last := self.checked(trial, end)):
                    text = self.spelled(tokens) + end
                    return self.checked(matcher, text, before) or Completion(
                        text, (*tokens, *last.tokens)
                    )
                steps.left -= 1
                following = trial.forced_tokens()
                if not following:
                    trial.fill_bitmask(self._row)
                    mask = self._row.tobytes()
                    if (
                        mask != searched
                        and self._literals
                        and self._mark in self._allowed()
                    ):
                        following = self._end_of_text(trial, mask, steps)
                        if following:
                            searched = b""
                        else:
                            searched = mask
                    following = following or self._choose(
                        np.frombuffer(mask, np.int32), uses, patience
                    )
                if (
                    len(tokens) + len(following) > most
                    or steps.left < 0
                    or not following
                ):
                    return None
                trial.accept_tokens(following)
                tokens += following
        except GuidedError:
            return None
        text = self.spelled(tokens)
        return self.checked(matcher, text, before) or Completion(text, tuple(tokens))

    def _end_of_text(self, trial: Matcher, mask: bytes, steps: Steps) -> list[int]:
        """Return the tokens of a literal that ends a text with this mask, without an
        optional beginning, or nothing."""
        ending = b""
        for literal in self._literals:
            if not ending or ending.endswith(literal.encode()):
                steps.left -= 1
                after = trial.fork()
                with contextlib.suppress(GuidedError):
                    after.accept_tokens(self._encode(literal.encode()))
                    after.fill_bitmask(self._row)
                    if self._row.tobytes() != mask and (
                        after.is_accepting() or not self.is_free(self._row)
                    ):
                        ending = literal.encode()
        return list(self._encode(ending))

    def _choose(
        self, mask: Bitmask, uses: NDArray[np.int64], patience: int
    ) -> list[int]:
        """Return the preferred next token, or nothing at a dead end."""
        np.bitwise_and(mask, self._permitted, out=self._row)
        allowed = self._allowed()
        if not len(allowed):
            return [int(token) for token in allowed_ids(self._row)[:1]]
        ranks = self._ranks
        if self._mark in allowed:
            ranks = self._text_ranks
        worn = np.where(self._closing, 0, uses // patience * 1000)
        best = allowed[np.argmin((ranks + worn)[allowed])]
        uses[best] += 1
        return [int(self._singles[best])]

    def _allowed(self) -> NDArray[np.int64]:
        """Return the places in `_singles` of the bytes that `_row` allows."""
        return np.flatnonzero((self._row[self._words] >> self._bits) & 1)

    def checked(
        self, matcher: Matcher, text: bytes, before: TokenIds = ()
    ) -> Completion | None:
        """Return `text` as a completion after the tokens `before` if `matcher` accepts
        it.

        The completion has the tokenizer's own tokens.
        """
        with contextlib.suppress(GuidedError):
            tokens = self._encode(text)
            output = [*before, *tokens, self._stop]
            if matcher.accepts(output) == len(output):
                return Completion(text, tokens)
        return None

    def inherited(
        self, matcher: Matcher, known: Completion, token: int
    ) -> Completion | None:
        """Derive a completion after `token` from the completion before it. `matcher`
        has not accepted `token` yet."""
        new = self.spelled([token])
        if known.tokens[:1] == (token,):
            return Completion(known.text[len(new) :], known.tokens[1:])
        return self.first_accepted(matcher, _rests(known.text, new), token)

    def first_accepted(
        self, matcher: Matcher, texts: Iterable[bytes], token: int
    ) -> Completion | None:
        """Return the first of `texts` that completes an output after `token`."""
        for text in texts:
            completion = self.checked(matcher, text, [token])
            if completion is not None:
                return completion
        return None


class BudgetedSequence:
    """The completions of one sequence, after each of its output tokens.

    The state depends only on the output and the budget, so a replay and a rollback
    restore the same masks.

    Args:
        budget: maximum number of output tokens, with the stop token.
    """

    def __init__(self, completions: Completions, budget: int) -> None:
        self._completions = completions
        self._budget = budget
        self._known: list[Completion | None] = []
        """The completion after each number of output tokens. None: no completion was
        found."""
        self.steered = False
        """Whether a mask was restricted."""

    def roll_back(self, length: int) -> None:
        """Forget the completions after the first `length` output tokens."""
        del self._known[length + 1 :]

    def accept(self, matcher: Matcher, tokens: TokenIds) -> None:
        """Let the matcher accept tokens, and find a completion after each. Raises as
        `Matcher.accept_tokens`."""
        self._start(matcher)
        for token in tokens:
            known = self._known[-1]
            position = len(self._known)
            left = self._budget - position
            completion = None
            end = b""
            room = -1
            if known is not None:
                completion = self._completions.inherited(matcher.fork(), known, token)
                end = known.text
            matcher.accept_tokens([token])
            if matcher.is_terminated() or matcher.is_accepting():
                completion = _COMPLETE
            if completion is not None:
                end = b""
                room = left - 1 - len(completion.tokens)
            if room < 0 or (room < _NEAR and position % 16 == 0):
                searched = self._completions.find(
                    matcher, Steps(_SEARCH), 60 + 3 * left, end
                )
                completion = _shorter(completion, searched)
            self._known.append(completion)

    def _start(self, matcher: Matcher) -> None:
        """Find the completion of the empty output.

        Raises:
            InvalidRequest: the budget is too small, or no completion was found.
        """
        if self._known:
            return
        least = self._completions.first(matcher)
        if least is None:
            raise InvalidRequest(
                "no short answer to this constraint was found: leave out complete",
                param="complete",
            )
        needed = len(least.tokens) + 1
        if needed > self._budget:
            raise InvalidRequest(
                f"max_tokens is {self._budget}, and the shortest complete answer that was found takes {needed} "
                f"tokens with its stop token: give at least {needed}",
                param="max_tokens",
            )
        self._known.append(least)

    def restrict(self, matcher: Matcher, row: Bitmask) -> None:
        """Clear the bits of tokens after which no completion would fit.

        Args:
            row: mask of the allowed text tokens, int32 `[words]`.
        """
        self._start(matcher)
        known = self._known[-1]
        position = len(self._known) - 1
        if known is None:
            return
        left = self._budget - position - 1  # output tokens that may follow the next one
        room = left - 1 - len(known.tokens)
        if room >= _FAR:
            return
        completions = self._completions
        trial = matcher.fork()
        near = room < _NEAR
        unrestricted = np.zeros_like(row)
        steps = Steps(_SEARCH)
        if completions.is_free(row):
            # most tokens need no search, and masks of free text take longest
            steps = Steps(_SEARCH // 4)
            # they do not fit if the known completion continues the text
            samples = completions.samples
            if all(
                fits for _, fits in self._tried(trial, samples, known, left, Steps(0))
            ):
                unrestricted = row & completions.text
                if near:
                    unrestricted = row & completions.plain
        rest = row
        if unrestricted.any():
            rest = row & ~completions.text
        special = allowed_ids(rest & completions.special).tolist()
        candidates = list(
            dict.fromkeys([*known.tokens[:1], *special, *completions.shortest(rest)])
        )
        tried = dict(self._tried(trial, candidates, known, left, steps))
        fitting = completions.mask([token for token, fits in tried.items() if fits])
        if near:
            kept = row & (unrestricted | fitting)
            # no completion fits: end as soon as possible
            if not (kept.any() or matcher.is_accepting()):
                # even if an output rule forbids it
                kept = completions.mask(known.tokens[:1])
        else:
            unfit = [token for token, fits in tried.items() if fits is False]
            kept = row & (~completions.beginning_with(unfit) | fitting)
        if (kept != row).any() and (kept.any() or matcher.is_accepting()):
            self.steered = True
            row[:] = kept

    def _tried(
        self,
        matcher: Matcher,
        candidates: TokenIds,
        known: Completion,
        left: int,
        steps: Steps,
    ) -> Iterator[tuple[int, bool | None]]:
        """Yield each candidate, and whether a completion of fewer than `left` tokens
        was found. None: not searched."""
        texts: list[bytes] = []
        completions = self._completions
        for token in candidates:
            completion = completions.inherited(matcher, known, token)
            completion = completion or completions.first_accepted(matcher, texts, token)
            if completion is None:
                completion = completions.find(
                    matcher, steps, 60 + 3 * left, known.text, [token]
                )
                if completion is not None and len(texts) < _TEXTS:
                    texts.append(completion.text)
            if completion is not None:
                yield token, len(completion.tokens) < left
            elif steps.left > 0:
                yield token, False
            else:
                yield token, None


def _shorter(first: Completion | None, second: Completion | None) -> Completion | None:
    """Return the completion with fewer tokens, the first of two equal ones. None: there
    is none."""
    if first is None or (second is not None and len(second.tokens) < len(first.tokens)):
        return second
    return first


def _single_bytes(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the ids of single-byte tokens, one for each byte, ascending."""
    tokens = {
        vocabulary.token_bytes[token]: token
        for token in reversed(vocabulary.text_token_ids)
    }
    return np.array(
        sorted(token for content, token in tokens.items() if len(content) == 1),
        np.int64,
    )


def _rank(order: bytes, byte: int) -> int:
    """Return the sort key of a byte: first the bytes in `order`, then other printable
    characters, opening brackets and backslash, and last all other bytes."""
    if byte in order:
        return order.index(byte)
    if byte < 33 or byte > 126:
        return 700 + byte
    if byte in b"{[(<\\":
        return 400 + byte
    return 100 + byte


def _rests(known: bytes, new: bytes) -> Iterator[bytes]:
    """Yield texts that may complete an output after `new`. `known` completed the output
    before `new`."""
    if known.startswith(new):
        yield known[len(new) :]
        return
    # A new token may make up to six bytes at the beginning of the known completion
    # superfluous.
    for skipped in range(min(6, len(known)) + 1):
        yield known[skipped:]
    # texts that may be missing between a new token and the known completion
    for joint in (b",", b'",'):
        yield joint + known
