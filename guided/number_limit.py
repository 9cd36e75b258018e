"""A limit on the number of digits in JSON numbers. The libraries have none.

A model that has begun to repeat a digit could continue until the end of the context.
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
    """The tokens of a vocabulary that begin or end with a digit."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        contents = vocabulary.token_bytes
        self._ending = [len(content) - len(content.rstrip(_DIGITS)) for content in contents]
        """By token: number of digits at its end."""
        beginning = [token for token in vocabulary.text_token_ids if contents[token][0] in _DIGITS]
        self._others = ~pack(beginning, vocabulary.padded_vocab_size)

    def restrict(self, output: Sequence[int], row: NDArray[np.int32], accepting: bool) -> None:
        """Forbid tokens that begin with a digit after `MAX_DIGITS` digits of a number.

        Args:
            output: the tokens of a JSON text.
            row: the tokens that are allowed. Left as it is where nothing but digits may follow.
            accepting: the text may end here.
        """
        if output and self._ending[output[-1]] and self._is_long(output):
            others = row & self._others
            if accepting or others.any():
                row[:] = others

    def _is_long(self, output: Sequence[int]) -> bool:
        count = 0
        for token in reversed(output):
            count += self._ending[token]
            if count >= MAX_DIGITS or self._ending[token] < len(self._vocabulary.token_bytes[token]):
                break
        if count < MAX_DIGITS:
            return False
        return b'"' not in _STRINGS.sub(b"", self._vocabulary.decode(output))  # not within a string
