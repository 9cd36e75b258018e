"""The token bitmask: int32 `[rows, ceil(padded_vocab_size / 32)]`, bit 1 = allowed.

Token t is bit `t % 32` of word `t // 32`. Torch is imported where logits are masked only: a process that computes masks
does without its 3 seconds and 170 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["allowed_ids", "apply_bitmask", "pack", "words"]


def words(padded_vocab_size: int) -> int:
    """int32 words a row has."""
    return (padded_vocab_size + 31) // 32


def pack(token_ids: Iterable[int], padded_vocab_size: int) -> NDArray[np.int32]:
    """One row, `[words]`, with exactly `token_ids` allowed."""
    bits = np.zeros(words(padded_vocab_size) * 32, dtype=np.uint8)
    bits[token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_ids(row: NDArray[np.int32]) -> NDArray[np.int64]:
    """The token ids that `row` (`[words]`) allows, ascending."""
    return np.flatnonzero(np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little"))


def apply_bitmask(logits: torch.Tensor, bitmask: NDArray[np.int32], rows: Sequence[int]) -> None:
    """Write -inf over the forbidden logits, in place.

    Args:
        logits: float `[batch, padded_vocab_size]`, any device.
        bitmask: int32 `[len(rows), words]`; row i belongs to `logits[rows[i]]`.
        rows: distinct rows of `logits`.

    Columns of `logits` beyond the bitmask (none when both are padded alike) are forbidden too.
    """
    import torch

    if not len(rows):
        return
    index = torch.as_tensor(rows, dtype=torch.int64, device=logits.device)
    forbidden = _unpack(bitmask, logits)
    whole = len(rows) == logits.shape[0] and bool((index == torch.arange(len(rows), device=index.device)).all())
    picked = logits if whole else logits.index_select(0, index)
    width = min(forbidden.shape[1], logits.shape[1])
    picked[:, :width].masked_fill_(forbidden[:, :width], float("-inf"))
    picked[:, width:] = float("-inf")
    if not whole:
        logits.index_copy_(0, index, picked)


def _unpack(bitmask: NDArray[np.int32], logits: torch.Tensor) -> torch.Tensor:
    """bool `[rows, words * 32]` on the device of `logits`, True = forbidden."""
    import torch

    if logits.device.type == "cpu":
        bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(np.equal(bits, 0))
    packed = torch.from_numpy(bitmask).to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).reshape(len(bitmask), -1) == 0
