"""The token bitmask: int32 `[rows, ceil(padded_vocab_size / 32)]`, bit 1 = allowed.

Token t is bit `t % 32` of word `t // 32`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Bitmask = NDArray[np.int32]
"""One row, int32 `[words]`."""


def words(padded_vocab_size: int) -> int:
    """Return the number of int32 words in a row."""
    return (padded_vocab_size + 31) // 32


def pack(token_ids: Iterable[int], padded_vocab_size: int) -> NDArray[np.int32]:
    """Return one row, int32 `[words]`, with exactly `token_ids` allowed."""
    bits = np.zeros(words(padded_vocab_size) * 32, dtype=np.uint8)
    bits[
        token_ids
        if isinstance(token_ids, np.ndarray)
        else np.fromiter(token_ids, dtype=np.int64)
    ] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_ids(row: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the token ids that `row` (int32 `[words]`) allows, ascending."""
    return np.flatnonzero(
        np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    )
