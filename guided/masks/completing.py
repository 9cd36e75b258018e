"""Completions: short texts after which the constraint is satisfied, and masks that leave room for a completion.

The search follows the bytes that probably end the output soonest, one single-byte token at a time. The tokenizer then
encodes the text of the completion in fewer tokens. The grammar library has accepted each token of a completion.

After every output token, one completion is known. The *room* is the number of tokens that the budget leaves beyond it:

- From `_FAR` on, masks stay unchanged.
- From `_NEAR` on, a token is forbidden if the completion after it would not fit. (`{` may begin an object with twenty
  required properties.)
- Below `_NEAR`, a token is allowed only if a completion after it is known and fits.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import allowed_ids, pack
from guided.errors import GuidedError, InvalidRequest
from guided.vocabulary import Vocabulary, valid_utf8

_FAR = 512
_NEAR = 32
_TRIED = 64
"""Maximum number of tokens that are tried for one mask, besides the shortest token with each first byte."""
_SEARCH = 400
"""Maximum number of tokens that the searches for one mask, or for the completion after one output token, try."""
_PATIENCE = (64, 2)
"""Number of uses of a byte after which other bytes are preferred, in the first attempt and in the second."""
_CLOSING = b"}])>\"'"
"""Bytes that close something. Their use does not count for `_PATIENCE`."""
_STRUCTURE = _CLOSING + b",:;=Z.0123456789-+a"
"""Bytes to try first where structure is expected, in this order."""
_MARKUP = b'"\\<>[]{}'
"""Bytes that may end a text, which is a JSON string or the text before a tag."""
_MARK = ord("~")
"""A byte that is rarely allowed outside of text. A position where it is allowed counts as text."""


@dataclass
class Steps:
    """The number of tokens that a search may still try."""

    left: int


class Completion(NamedTuple):
    """A text that satisfies the constraint after the output so far."""

    text: bytes
    tokens: tuple[int, ...]


class Completions:
    """Searches for completions over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._permitted = permitted = vocabulary.text_mask
        self._names = vocabulary.special_names
        self.special = np.zeros_like(permitted)
        """Mask of the special tokens that the grammar may allow, int32 `[words]`."""
        self._row = np.empty_like(permitted)
        self._literals: Sequence[str] = ()
        self.spelled = vocabulary.spelled
        self._stop = vocabulary.stop_token_ids[0]
        self._encode = lru_cache(maxsize=4096)(lambda text: tuple(vocabulary.encode(text)))
        ids = vocabulary.text_token_ids
        contents = vocabulary.token_bytes
        width = len(permitted) * 32
        self._vocabulary = vocabulary
        self._by_length = np.array(sorted(ids, key=lambda token: len(contents[token])), np.int64)
        self._first_bytes = np.array([int.from_bytes(content[:1]) for content in contents])
        never = frozenset(_MARKUP) | frozenset(range(32)) | {127}
        texts = [token for token in ids if not never.intersection(contents[token])]
        self.text = pack(texts, width)
        """Mask of the tokens that do not end a text, int32 `[words]`."""
        texts = [token for token in texts if valid_utf8(contents[token]) == len(contents[token])]
        self.plain = pack(texts, width)
        """Mask of the tokens in `text` with whole characters, int32 `[words]`."""
        self.samples = sorted(texts, key=lambda token: len(contents[token]))[:: max(1, len(texts) - 1)][:2]
        """The shortest and the longest token of `plain`."""
        self._short = pack([token for token in texts if len(contents[token]) <= 2], width)
        """Mask of the tokens in `plain` with one or two bytes, int32 `[words]`. Only free text allows all of them."""
        self._singles = _single_bytes(vocabulary)
        self._words = self._singles // 32
        self._bits = self._singles % 32
        spelled = [contents[token][0] for token in self._singles.tolist()]
        # Bytes to try first within text, in this order.
        self._ranks = tuple(np.array([_rank(order, byte) for byte in spelled]) for order in (_STRUCTURE, b'" -0aA'))
        self._closing = np.array([byte in _CLOSING for byte in spelled], np.bool_)
        if _MARK in spelled:
            self._mark = spelled.index(_MARK)
        else:
            self._mark = -1

    def of(self, grammar: CompiledGrammar) -> Completions:
        """Return a copy for one grammar, with its special tokens and literals. The copy shares the other tables."""
        shared = copy(self)
        shared._row = np.empty_like(self._row)  # a worker's two threads fill rows of different grammars at once
        shared._literals = grammar.literals
        special = grammar.special_token_ids
        names = {name.encode(): token for name, token in self._names.items() if token in special}
        shared.special = pack(special, len(self._permitted) * 32)
        shared._permitted = self._permitted | shared.special
        if names:
            parts = re.compile(b"(" + b"|".join(map(re.escape, names)) + b")")

            def encode(text: bytes) -> tuple[int, ...]:
                tokens: list[int] = []
                for part in parts.split(text):
                    if part in names:
                        tokens += (names[part],)
                    else:
                        tokens += self._encode(part)
                return tuple(tokens)

            shared._encode = lru_cache(maxsize=1024)(encode)
        return shared

    def first(self, matcher: Matcher) -> Completion | None:
        """Search for a short output, which is a completion of the empty output.

        The search tries each first byte, and each literal and pair of literals at the beginning.
        """
        if matcher.is_accepting():
            return Completion(b"", ())
        whole = [self._roll_out(matcher, Steps(2000), patience, 1000) for patience in _PATIENCE]
        shortest = min(filter(None, whole), key=_length, default=None)
        matcher.fill_bitmask(self._row)
        texts = [literal.encode() for literal in self._literals]
        begun = list(texts)
        if not self.is_free(self._row):
            begun += [self.spelled([token]) for token in self._singles[self._allowed()].tolist()]
        begun += islice(map(b"".join, permutations(texts, 2)), 48)
        steps = Steps(3000)
        for text in begun:
            if shortest is None:
                most = 1000
            else:
                most = len(shortest.text)
            rest = self.find(matcher, steps, most, before=self._encode(text))
            whole = [shortest, rest and self.checked(matcher, text + rest.text)]
            shortest = min(filter(None, whole), key=_length, default=None)
        if shortest is None:
            return None
        used = [text.decode() for text in begun if len(text) > 1 and shortest.text.startswith(text)]
        self._literals = [*sorted(used, key=len, reverse=True), *self._literals]
        return self._shortened(matcher, shortest)

    def shortest(self, row: NDArray[np.int32]) -> list[int]:
        """Return text tokens of a mask: the shortest tokens, then the shortest token with each first byte."""
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        ids = self._by_length[bits[self._by_length] != 0]
        first = np.full(256, -1)
        first[self._first_bytes[ids[::-1]]] = ids[::-1]  # the last assignment, of the shortest token, counts
        return [*ids[:_TRIED].tolist(), *first[first >= 0].tolist()]

    def beginning_with(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Return a mask of the tokens that begin with one of `tokens`: int32 `[words]`."""
        begun = self._vocabulary.beginning_with([self.spelled([token]) for token in tokens])
        return begun | pack(tokens, len(begun) * 32)

    def _shortened(self, matcher: Matcher, completion: Completion) -> Completion:
        """Remove members of JSON objects, one by one, if the matcher accepts the rest."""
        try:
            value = json.loads(completion.text)
        except ValueError:  # the text is not JSON
            return completion
        parts = [value]
        for part in parts:  # the loop appends to `parts`
            for name in list(part) if isinstance(part, dict) else ():
                members = dict(part)
                del part[name]
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                shorter = self.checked(matcher, text.encode())
                if shorter is None:
                    part.clear()
                    part.update(members)
                completion = shorter or completion
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return completion

    def is_free(self, row: NDArray[np.int32]) -> bool:
        """Return whether a mask allows text with any characters."""
        return not (self._short & ~row).any()

    def find(
        self, matcher: Matcher, steps: Steps, most: int, end: bytes = b"", before: Sequence[int] = ()
    ) -> Completion | None:
        """Search for a short completion after the tokens `before`. `matcher` does not change.

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
        self, matcher: Matcher, steps: Steps, patience: int, most: int, end: bytes = b"", before: Sequence[int] = ()
    ) -> Completion | None:
        """Follow the preferred bytes until the constraint is satisfied, for at most `most` tokens."""
        uses = np.zeros(len(self._singles), np.int64)
        tokens: list[int] = []
        searched = b""  # the mask of a text for which `_end_of_text` found no literal
        try:
            trial = matcher.fork()
            trial.accept_tokens(before)
            while not trial.is_accepting():
                if end and (last := self.checked(trial, end)):
                    text = self.spelled(tokens) + end
                    return self.checked(matcher, text, before) or Completion(text, (*tokens, *last.tokens))
                steps.left -= 1
                following = trial.forced_tokens()
                if not following:
                    trial.fill_bitmask(self._row)
                    mask = self._row.tobytes()
                    if mask != searched and self._literals and self._mark in self._allowed():
                        following = self._end_of_text(trial, mask, steps)
                        if following:
                            searched = b""
                        else:
                            searched = mask
                    following = following or self._choose(np.frombuffer(mask, np.int32), uses, patience)
                if len(tokens) + len(following) > most or steps.left < 0 or not following:
                    return None
                trial.accept_tokens(following)
                tokens += following
        except GuidedError:
            return None
        text = self.spelled(tokens)
        return self.checked(matcher, text, before) or Completion(text, tuple(tokens))

    def _end_of_text(self, trial: Matcher, mask: bytes, steps: Steps) -> list[int]:
        """Return the tokens of a literal that ends a text with this mask, without an optional beginning, or nothing."""
        ending: str | None = None
        for literal in self._literals:
            if ending is None or ending.endswith(literal):
                steps.left -= 1
                after = trial.fork()
                with contextlib.suppress(GuidedError):
                    after.accept_tokens(self._encode(literal.encode()))
                    after.fill_bitmask(self._row)
                    if self._row.tobytes() != mask and (after.is_accepting() or not self.is_free(self._row)):
                        ending = literal
        if ending is None:
            return []
        return list(self._encode(ending.encode()))

    def _choose(self, mask: NDArray[np.int32], uses: NDArray[np.int64], patience: int) -> list[int]:
        """Return the preferred next token, or nothing at a dead end."""
        np.bitwise_and(mask, self._permitted, out=self._row)
        allowed = self._allowed()
        if not len(allowed):
            return [*self.shortest(self._row)[:1], *allowed_ids(self._row).tolist()][:1]
        ranks = self._ranks[1 if self._mark in allowed else 0]
        worn = np.where(self._closing, 0, uses // patience * 1000)
        best = allowed[np.argmin((ranks + worn)[allowed])]
        uses[best] += 1
        return [int(self._singles[best])]

    def _allowed(self) -> NDArray[np.int64]:
        """Return the places in `_singles` of the bytes that `_row` allows."""
        return np.flatnonzero((self._row[self._words] >> self._bits) & 1)

    def checked(self, matcher: Matcher, text: bytes, before: Sequence[int] = ()) -> Completion | None:
        """Return `text` as a completion after the tokens `before` if `matcher` accepts it.

        The completion has the tokenizer's own tokens.
        """
        try:
            tokens = self._encode(text)
            output = [*before, *tokens, self._stop]
            if matcher.accepts(output) == len(output):
                return Completion(text, tokens)
            return None
        except GuidedError:
            return None

    def inherited(self, matcher: Matcher, known: Completion, token: int) -> Completion | None:
        """Derive a completion after `token` from the completion before it. `matcher` has not accepted `token` yet."""
        new = self.spelled([token])
        if known.tokens[:1] == (token,):
            return Completion(known.text[len(new) :], known.tokens[1:])
        derived = (self.checked(matcher, text, [token]) for text in _rests(known.text, new))
        return next(filter(None, derived), None)


class BudgetedSequence:
    """The completions of one sequence, after each of its output tokens.

    The state depends only on the output and the budget, so a replay and a rollback restore the same masks.

    Args:
        budget: maximum number of output tokens, with the stop token.
    """

    def __init__(self, completions: Completions, budget: int) -> None:
        self._completions = completions
        self._budget = budget
        self._known: list[Completion | None] = []
        """The completion after each number of output tokens. None: no completion was found."""
        self.steered = False
        """Whether a mask was restricted."""

    def roll_back(self, length: int) -> None:
        """Forget the completions after the first `length` output tokens."""
        del self._known[length + 1 :]

    def accept(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Let the matcher accept tokens, and find a completion after each. Raises as `Matcher.accept_tokens`."""
        self._start(matcher)
        for token in tokens:
            known = self._known[-1]
            position = len(self._known)
            if known is None:
                completion = None
            else:
                completion = self._completions.inherited(matcher.fork(), known, token)
            matcher.accept_tokens([token])
            if matcher.is_terminated() or matcher.is_accepting():
                completion = Completion(b"", ())
            left = self._budget - position
            if completion is None:
                room = 0
            else:
                room = left - 1 - len(completion.tokens)
            if room < 0 or completion is None or (room < _NEAR and position % 16 == 0):
                if known is not None and completion is None:
                    end = known.text
                else:
                    end = b""
                searched = self._completions.find(matcher, Steps(_SEARCH), 60 + 3 * left, end)
                completion = min(filter(None, (completion, searched)), key=_length, default=None)
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
            raise InvalidRequest("no short answer to this constraint was found: leave out complete", param="complete")
        needed = len(least.tokens) + 1
        if needed > self._budget:
            raise InvalidRequest(
                f"max_tokens is {self._budget}, and the shortest complete answer that was found takes {needed} "
                f"tokens with its stop token: give at least {needed}",
                param="max_tokens",
            )
        self._known.append(least)

    def restrict(self, matcher: Matcher, row: NDArray[np.int32]) -> None:
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
            steps = Steps(_SEARCH // 4)  # most tokens need no search, and masks of free text take longest
            samples = completions.samples  # they do not fit if the known completion continues the text
            if all(fits for _, fits in self._tried(trial, samples, known, left, Steps(0))):
                unrestricted = row & (completions.plain if near else completions.text)
        rest = row & ~(completions.text if unrestricted.any() else 0)
        special = allowed_ids(rest & completions.special).tolist()
        candidates = list(dict.fromkeys([*known.tokens[:1], *special, *completions.shortest(rest)]))
        tried = dict(self._tried(trial, candidates, known, left, steps))
        fitting = pack([token for token, fits in tried.items() if fits], len(row) * 32)
        if near:
            kept = row & (unrestricted | fitting)
            if not (kept.any() or matcher.is_accepting()):  # no completion fits: end as soon as possible
                kept = pack(known.tokens[:1], len(row) * 32)  # even if an output rule forbids it
        else:
            unfit = [token for token, fits in tried.items() if fits is False]
            kept = row & (~completions.beginning_with(unfit) | fitting)
        if (kept != row).any() and (kept.any() or matcher.is_accepting()):
            self.steered = True
            row[:] = kept

    def _tried(
        self, matcher: Matcher, candidates: Sequence[int], known: Completion, left: int, steps: Steps
    ) -> Iterator[tuple[int, bool | None]]:
        """Yield each candidate, and whether a completion of fewer than `left` tokens was found. None: not searched."""
        texts = list[bytes]()
        completions = self._completions
        for token in candidates:
            others = (completions.checked(matcher, text, [token]) for text in texts)
            completion = completions.inherited(matcher, known, token) or next(filter(None, others), None)
            if completion is None:
                completion = completions.find(matcher, steps, 60 + 3 * left, known.text, [token])
                # Four of these completions are also tried for the following candidates.
                if completion is None or len(texts) >= 4:
                    texts += []
                else:
                    texts += [completion.text]
            if completion is not None:
                yield token, len(completion.tokens) < left
            else:
                yield token, None if steps.left <= 0 else False


def _length(completion: Completion) -> int:
    return len(completion.tokens)


def _single_bytes(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the ids of single-byte tokens, one for each byte, ascending."""
    tokens = {vocabulary.token_bytes[token]: token for token in reversed(vocabulary.text_token_ids)}
    return np.array(sorted(token for content, token in tokens.items() if len(content) == 1), np.int64)


def _rank(order: bytes, byte: int) -> int:
    """Return the sort key of a byte: first the bytes in `order`, then other printable characters, opening brackets and
    backslash, and last all other bytes."""
    if byte in order:
        return order.index(byte)
    if byte < 33 or byte > 126:
        return 700 + byte
    return (400 if byte in b"{[(<\\" else 100) + byte


def _rests(known: bytes, new: bytes) -> Iterator[bytes]:
    """Yield texts that may complete an output after `new`. `known` completed the output before `new`."""
    if known.startswith(new):
        yield known[len(new) :]
        return
    # A new token may make up to six bytes at the beginning of the known completion superfluous.
    for skipped in range(min(6, len(known)) + 1):
        yield known[skipped:]
    for joint in (b",", b'",'):  # texts that may be missing between a new token and the known completion
        yield joint + known
