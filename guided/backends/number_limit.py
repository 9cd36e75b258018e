"""A limit on the digits of numbers in JSON, for libraries that allow any number of them.

A model that has begun to repeat a digit would go on to the end of the context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.vocabulary import Vocabulary

MAX_DIGITS = 24
"""Digits in a row after which a number ends. 64-bit integers have at most 20, doubles 17. A token may exceed it."""

_DIGITS = b"0123456789"
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class NumberLimit:
    """The tokens of a vocabulary that go on with a number."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        contents = vocabulary.token_bytes
        self._ending = frozenset(token for token in vocabulary.text_token_ids if contents[token][-1] in _DIGITS)
        beginning = [token for token in vocabulary.text_token_ids if contents[token][0] in _DIGITS]
        self._others = ~pack(beginning, vocabulary.padded_vocab_size)

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Whether JSON text ends with `MAX_DIGITS` digits of a number."""
        if not tokens or tokens[-1] not in self._ending:
            return False
        tail = self._vocabulary.decode(tokens[-MAX_DIGITS:])
        if len(tail) - len(tail.rstrip(_DIGITS)) < MAX_DIGITS:
            return False
        return b'"' not in _STRINGS.sub(b"", self._vocabulary.decode(tokens))  # not within a string

    def end_number(self, row: NDArray[np.int32], accepting: bool) -> None:
        """Forbid tokens that begin with a digit, unless nothing else may follow (`accepting`: the text may end)."""
        others = row & self._others
        if accepting or others.any():
            row[:] = others
