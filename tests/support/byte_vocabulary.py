"""Vocabularies of bytes and of letters, with which masks are easy to read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids, words
from guided.vocabulary import Vocabulary

STOP = 0
BYTES = Vocabulary(
    token_bytes=(b"</s>", *(bytes([byte]) for byte in range(256)), b"<pad>"),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP, 257}),
    padded_vocab_size=264,
)
"""Token `byte + 1` is the byte, 0 is the stop token, 257 is padding, and 258 to 263 are
logits without a token."""
LETTERS = Vocabulary(
    (b"</s>", *(bytes([97 + index]) for index in range(26))),
    (STOP,),
    frozenset({STOP}),
    40,
)
"""Token 1 is "a", token 26 is "z", and 27 to 39 are logits without a token."""
WORDS = words(BYTES.padded_vocab_size)


def tokens(text: str) -> list[int]:
    """Return the tokens of `text`."""
    return [byte + 1 for byte in text.encode()]


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether an output may be `text` as a whole."""
    output = [*tokens(text), STOP]
    return grammar.matcher().accepts(output) == len(output)


def allowed(row: NDArray[np.int32]) -> str:
    """Return the characters that a mask allows, with `.` for the stop token. Only for
    ASCII."""
    return "".join(
        "." if token == STOP else chr(token - 1) for token in allowed_ids(row).tolist()
    )
