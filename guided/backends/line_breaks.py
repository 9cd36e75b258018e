"""Line breaks between the tokens of JSON text, where llguidance would allow them between any two.

In llguidance, whitespace is a lexeme that may stand before every other one. So the adapter lets this lexeme be a line
break with its indentation, and forbids here what JSON text does not usually have: a line break before a comma or a
colon, after a colon, in an empty container, after a blank, or twice. In JSON text a raw line break is never part of a
string, so the characters next to it tell which one it is.
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

_UNUSUAL = re.compile(rb"[ :]\n|\n *[,:\n]|[\[{]\n *[\]}]")
_TAIL = re.compile(rb"[\[{:]?\n? *\Z")
"""Matches the end of an output that matters."""
_AFTER_VALUE = re.compile(rb"[^,\[{]\n *\Z")
"""Matches the end of a token that ends a line after a value. A comma may have to follow."""
_CLOSING = re.compile(rb'\n(?!.*\n)|(?: *|[^"\n]*(?="))("[\]}]*|[\]}]+)\n *\Z')
"""Matches a token that begins with a line break, or ends a value or several, and then the line. The group is what ends
them."""


class LineBreaks:
    """Which tokens are unusual after an output. All grammars of one vocabulary share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        ids = {vocabulary.token_bytes[token]: token for token in vocabulary.text_token_ids}
        self._contents = {token: text for text, token in ids.items() if re.match(rb" *[,:\]}]|(?s:.*)\n", text)}
        self.tokens = frozenset(self._contents)
        """All tokens that may make a line break unusual."""
        self._closing: dict[bytes, set[int]] = {}
        """By what ends a value: the tokens that do, and end the line."""
        for token, text in self._contents.items():
            closing = _CLOSING.match(text)
            if closing and (closing[1] or b"") + b"," in ids:
                self._closing.setdefault(closing[1] or b"", set()).add(token)
        # A value may be followed by a line break where a bracket can close its container. Tokens with the end of the
        # value and the bracket, such as `"}`, show that in the mask.
        texts = [b"\n", b"z", *(end + mark for end in self._closing for mark in (b",", b":", b"}", b"]"))]
        probes = np.array([ids.get(text, -1) for text in texts])
        self._words = probes // 32
        self._bits = np.where(probes < 0, 0, 1 << probes % 32).astype(np.uint32).view(np.int32)
        self._unusual = lru_cache(maxsize=64)(self._find_unusual)
        self._kept = lru_cache(maxsize=256)(self._find_kept)

    def forbids(self, token: int, output: Sequence[int]) -> bool:
        """Whether `token` after `output` makes a line break unusual."""
        return token in self._unusual(self._tail(output))

    def kept(self, output: Sequence[int], row: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a mask without the tokens that are unusual after `output`. `row`: what the library allows."""
        return self._kept(self._tail(output), (row[self._words] & self._bits).tobytes())

    def _tail(self, output: Sequence[int]) -> bytes:
        text = self._vocabulary.token_bytes[output[-1]] if output else b""
        if not text.strip(b" \n"):
            text = self._vocabulary.decode(output[-MAX_INDENT - 3 :])
        return _shortened(text)

    def _find_unusual(self, tail: bytes) -> set[int]:
        return {token for token, text in self._contents.items() if _UNUSUAL.search(tail + text)}

    def _find_kept(self, tail: bytes, probes: bytes) -> NDArray[np.int32]:
        line_break, letter, *others = np.frombuffer(probes, np.int32).tolist()
        if line_break and letter:  # both are possible in the free text of a structural tag
            return ~pack((), self._vocabulary.padded_vocab_size)
        unusual = {token for token, text in self._contents.items() if _AFTER_VALUE.search(text)}
        for index, tokens in enumerate(self._closing.values()):
            comma, colon, *brackets = others[4 * index : 4 * index + 4]
            if any(brackets) or not (comma or colon):
                unusual -= tokens
            else:
                unusual |= tokens
        return ~pack(unusual | self._unusual(tail), self._vocabulary.padded_vocab_size)


@lru_cache(maxsize=1 << 14)
def _shortened(text: bytes) -> bytes:
    """Return the end of `text` that matters. Blanks are left out in pairs: their number has no effect."""
    return b"".join(_TAIL.findall(text)).replace(b"  ", b"")
