"""Tokens by the keys, values and containers that they can end. Only such tokens of a mask have to be checked."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import each_allowed, pack
from guided.vocabulary import Vocabulary

_ENDS_AFTER_ESCAPE = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)+"', re.DOTALL)
_KEY = re.compile(rb'[ \t\n\r]*"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_LATER_KEY = re.compile(rb'["\d\]}esl][ \t\n\r]*,' + _KEY.pattern + rb"|\A[ \t\n\r]*," + _KEY.pattern, re.DOTALL)
_STRING_END = rb'[^"\\]*(?:\\.[^"\\]*)*"'
_ENDS_AND_MORE = re.compile(_STRING_END + rb".*[\]},:]", re.DOTALL)
_OPENS = rb"[{\[][ \t\n\r]*[^ \t\n\r]"


class TokenClass:
    """A set of tokens, compared with masks quickly."""

    def __init__(self, tokens: list[int], padded_vocab_size: int) -> None:
        row = pack(tokens, padded_vocab_size)
        self._words = np.flatnonzero(row)
        self._bits = row[self._words]

    def __bool__(self) -> bool:
        return len(self._words) > 0

    def allowed(self, row: NDArray[np.int32]) -> list[int]:
        """Return the tokens of this class that `row` allows."""
        if not len(self._words):
            return []
        found = row[self._words]
        found &= self._bits
        at = found.nonzero()[0]
        return list(each_allowed(found[at].tolist(), self._words[at].tolist()))


class TokenIndex:
    """The tokens of a vocabulary that a guard may have to veto, by class."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        contents = vocabulary.token_bytes
        self.contents = contents
        texts = [(contents[token], token) for token in vocabulary.text_token_ids]
        self.plain = bytes(not (b'"' in content or b"\\" in content) for content in contents)
        """By token: whether it only continues the string that it begins in."""
        self._sorted = sorted(texts)
        self.starting_with = lru_cache(maxsize=4096)(self._starting_with)
        """Returns the tokens that start with a text. Cached, because keys recur."""
        self._equal: dict[bytes, list[int]] = {}
        for content, token in texts:
            self._equal.setdefault(content, []).append(token)

        def tokens(of: Callable[[bytes], object]) -> TokenClass:
            return TokenClass([token for content, token in texts if of(content)], vocabulary.padded_vocab_size)

        self.quoted = tokens(lambda content: b'"' in content)
        self.ends_after_escape = tokens(_ENDS_AFTER_ESCAPE.match)
        """Tokens with an escape and then the end of the string that they begin in."""
        self.ends_string_and_more = tokens(_ENDS_AND_MORE.match)
        """Tokens that end the string that they begin in, and have a comma, a colon or a closing bracket after it."""
        self.by_key: dict[bytes, list[int]] = {}
        """Tokens that start with a whole key, by its text between the quotes."""
        for content, token in texts:
            if match := _KEY.match(content):
                self.by_key.setdefault(match[1], []).append(token)
        self.has_later_key = tokens(_LATER_KEY.search)
        """Tokens with a comma and a whole key after it."""
        self.begins_later_key = tokens(re.compile(rb',[ \t\n\r]*"[^"]+\Z').search)
        """Tokens that end with a comma and the beginning of a key."""
        self.opens = tokens(re.compile(_OPENS).search)
        """Tokens that open a container and have something of its contents."""
        self.ends_string_and_opens = tokens(re.compile(_STRING_END + rb".*" + _OPENS, re.DOTALL).match)
        self.has_end = tokens(re.compile(rb"[\]},]").search)
        self.ends_scalar = tokens(re.compile(rb"[\]}, \t\n\r]").search)
        self.after_value = tokens(re.compile(rb"[ \t\n\r]*[\]},:]").match)
        self.spaced = tokens(re.compile(rb'[:,{}\[\]"][ \t\n\r]|[ \t\n\r][:,{}\[\]"]').search)
        """Tokens with whitespace next to a bracket, quote, comma or colon."""
        self.blank = tokens(re.compile(rb"[ \t\n\r]+\Z").match)

    def _starting_with(self, prefix: bytes) -> list[int]:
        first = bisect_left(self._sorted, (prefix,))
        last = bisect_right(self._sorted, prefix, first, key=lambda text: text[0][: len(prefix)])
        return [token for _, token in self._sorted[first:last]]

    def beginning(self, text: bytes) -> Iterator[int]:
        """Iterate over the tokens with which `text` starts, except for `text` itself."""
        for length in range(1, len(text)):
            yield from self._equal.get(text[:length], ())
