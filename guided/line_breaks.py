"""The rule for line breaks in JSON text, for a library that allows them between any two tokens of JSON.

llguidance's whitespace is a lexeme that may stand before every other one, a line break with its indentation. `LineBreaks`
forbids it where JSON text does not usually have it: before a comma or a colon, after a colon or a blank, in an empty
container, after the value, and twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.constraint import MAX_INDENT
from guided.vocabulary import Vocabulary

_UNUSUAL = re.compile(rb'[ :]\n|\n *[,:\n]|[\[{]\n *[\]}]|["\]}\w]\n *\Z')
"""Matches unusual line breaks, and a value and a line break at the end of a token: a comma may have to follow."""
_TAIL = re.compile(rb"[\[{]?\n(?= *\Z)|[\[{,: ]\Z")
"""Matches the end of an output, unless it is the end of a value."""
_PART = re.compile(rb" *[,:\]}]|[^\n]*\n")
"""Matches tokens that can be unusual after an output."""


class LineBreaks:
    """Forbids unusual line breaks in JSON, also within a structural tag.

    JSON strings have no raw line breaks. So where a letter is allowed, the output is in a string if no line break is
    allowed, and in free text otherwise. A token that ends a value and then the line, such as `"\\n`, is never allowed:
    it is not known yet whether a bracket can follow. So a model writes `"` and `\\n`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._contents = vocabulary.token_bytes
        self._texts = [(token, self._contents[token]) for token in vocabulary.text_token_ids]
        self._parts = [(token, text) for token, text in self._texts if _PART.match(text)]
        self._width = vocabulary.padded_vocab_size
        self._line_break = self._bit(b"\n")
        self._letter = self._bit(b"x")
        self._usual = self._without(_UNUSUAL)
        self._unbroken = self._without(re.compile(rb"\A\n *\Z"))
        self._nothing = bytes(self._usual.nbytes)
        self._following = lru_cache(maxsize=None)(self._find_following)
        self._after = lru_cache(maxsize=1 << 14)(self._find_after)

    def restrict(self, output: Sequence[int], row: NDArray[np.int32], accepting: bool) -> None:
        """See `OutputRule.restrict`. Where only an unusual line break is possible, it is left."""
        word, bit = self._line_break
        is_possible = row.item(word) >> bit & 1
        word, bit = self._letter
        if row.item(word) >> bit & 1:
            if not is_possible:
                np.bitwise_and(row, self._usual, out=row)
            return
        text = b""
        for token in output[: -MAX_INDENT - 3 : -1]:
            text = self._contents[token] + text
            if text.strip(b" \n"):
                break
        usual, words, bits = self._after(text)
        others = row & usual
        if is_possible and not (row[words] & bits).any():
            others &= self._unbroken
        if accepting or others.tobytes() != self._nothing:
            row[:] = others

    def _find_after(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        tail = _TAIL.search(text)
        return self._following(tail[0] if tail else b"")

    def _find_following(self, tail: bytes) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        """Return which tokens are usual after `tail`, and of which others one must be allowed for a line break.

        These are bits, and the words that they are in. After a value they close a container, otherwise they begin one
        of its values.
        """
        needed = re.compile(rb"[^\s\]}]\Z" if tail else rb"[\]}]\Z")
        others = pack([token for token, text in self._texts if needed.match(text)], self._width)
        words = np.flatnonzero(others)
        return self._without(_UNUSUAL, tail), words, others[words]

    def _without(self, pattern: re.Pattern[bytes], tail: bytes = b"") -> NDArray[np.int32]:
        """Return the mask of all tokens that do not match after `tail`: int32 `[words]`."""
        return ~pack([token for token, text in self._parts if pattern.search(tail + text)], self._width)

    def _bit(self, start: bytes) -> tuple[int, int]:
        """Return the word and the bit of the shortest token that begins with `start`."""
        tokens = [token for token, text in self._texts if text.startswith(start)]
        return divmod(min(tokens, key=lambda token: len(self._contents[token]), default=0), 32)
