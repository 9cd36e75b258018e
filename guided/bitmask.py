"""The token bitmask: int32 `[rows, ceil(padded_vocab_size / 32)]`, bit 1 = allowed.

Token t is bit `t % 32` of word `t // 32`. Torch is imported where logits are masked only: a process that computes masks
does without its 3 seconds and 170 MB.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["allowed_ids", "apply_bitmask", "load_loose_kernel", "pack", "words"]

_MINUS_INFINITY = np.uint32(0xFF800000)
_LOOSE = 24
"""A row is loose where fewer than one token in so many is forbidden. Touching each forbidden logit takes xgrammar's
kernel about 6 ns; `_forbid` takes 0.27 ns a logit, forbidden or not (measured on a 2-core x86 machine)."""
_LEAST_LOOSE_WORDS = 32


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


Masks: TypeAlias = NDArray[np.int32] | Sequence[NDArray[np.int32]]
"""int32 `[rows, words]`, or as many `[words]`, wherever they are."""


def apply_bitmask(logits: torch.Tensor, bitmask: Masks, rows: Sequence[int]) -> None:
    """Write -inf over the forbidden logits, in place.

    Args:
        logits: float `[batch, padded_vocab_size]`, any device.
        bitmask: of `len(rows)` rows; row i belongs to `logits[rows[i]]`.
        rows: distinct rows of `logits`.

    Columns of `logits` beyond the bitmask (none when both are padded alike) are forbidden too. A forbidden NaN may stay
    one: it is no logit, and the model's fault.
    """
    import torch

    if not len(rows):
        return
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous():
        loose = _loose_rows(bitmask)
        if loose.any():
            picked = np.flatnonzero(loose).tolist()
            _apply_loose(logits, np.stack([bitmask[index] for index in picked]), [rows[index] for index in picked])
        _forbid(logits.numpy(), bitmask, [(index, rows[index]) for index in np.flatnonzero(~loose)])
    else:
        _apply_by_torch(logits, bitmask, rows)


def _forbid(logits: NDArray[np.float32], bitmask: Masks, pairs: Iterable[tuple[int, int]]) -> None:
    """For each (bitmask row, logits row), without a branch: at the speed of memory, whatever the mask.

    As unsigned integers, no float is larger than -inf but a NaN with its sign set: a maximum writes -inf.
    """
    table = _floor_of_byte()
    floor = np.empty((len(bitmask[0]) * 4, 8), np.uint32)
    width = min(floor.size, logits.shape[1])
    bits = logits.view(np.uint32)
    for index, row in pairs:
        np.take(table, np.ascontiguousarray(bitmask[index]).view(np.uint8), axis=0, out=floor, mode="clip")
        np.maximum(bits[row, :width], floor.reshape(-1)[:width], out=bits[row, :width])
        logits[row, width:] = -np.inf


@cache
def _floor_of_byte() -> NDArray[np.uint32]:
    """`[256, 8]`: by eight bits of a mask, the bit patterns of -inf where forbidden, 0 where allowed."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.uint32(0), _MINUS_INFINITY)


def load_loose_kernel() -> None:
    """Begin to load xgrammar's kernel, which is the fastest for masks that forbid little; until then, do without it.

    Where torch and transformers are loaded already it takes 0.3 s and 23 MB: on a thread, for no step to wait for it.
    """
    if "xgrammar" not in sys.modules:
        threading.Thread(target=__import__, args=("xgrammar",), name="load-xgrammar", daemon=True).start()


def _loose_rows(bitmask: Masks) -> NDArray[np.bool_]:
    """bool `[rows]`: which rows are better left to xgrammar's kernel, judged by a sample of their words.

    None as long as that isn't loaded; and none that are short: there it was seen to write what it shouldn't.
    """
    loaded = hasattr(sys.modules.get("xgrammar"), "apply_token_bitmask_inplace")
    num_words = len(bitmask[0])
    if not loaded or num_words < _LEAST_LOOSE_WORDS:
        return np.zeros(len(bitmask), np.bool_)
    every = max(1, num_words // 128)
    sample = np.array([row[::every] for row in bitmask]).view(np.uint32)
    size = sample.shape[1] * 32
    loose: NDArray[np.bool_] = np.bitwise_count(sample).sum(1, dtype=np.uint32) > size - size // _LOOSE
    return loose


def _apply_loose(logits: torch.Tensor, bitmask: NDArray[np.int32], rows: Sequence[int]) -> None:
    import torch

    xgrammar: Any = sys.modules["xgrammar"]
    indices: list[int] | None = list(rows)
    if indices == list(range(len(rows))):
        indices = None if len(rows) == len(logits) else indices
    else:  # its kernel takes one index for both
        spread = np.empty((max(rows) + 1, bitmask.shape[1]), np.int32)
        spread[rows] = bitmask
        bitmask = spread
    width = bitmask.shape[1] * 32
    size = min(width, logits.shape[1])
    xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(bitmask), vocab_size=size, indices=indices)
    if width < logits.shape[1]:
        logits[list(rows), width:] = float("-inf")


def _apply_by_torch(logits: torch.Tensor, bitmask: Masks, rows: Sequence[int]) -> None:
    import torch

    index = torch.as_tensor(rows, dtype=torch.int64, device=logits.device)
    whole = len(rows) == logits.shape[0] and list(rows) == list(range(len(rows)))
    picked = logits if whole else logits.index_select(0, index)
    forbidden = _unpack(bitmask, logits.device)
    width = min(forbidden.shape[1], logits.shape[1])
    picked[:, :width].masked_fill_(forbidden[:, :width], float("-inf"))
    picked[:, width:] = float("-inf")
    if not whole:
        logits.index_copy_(0, index, picked)


def _unpack(bitmask: Masks, device: torch.device) -> torch.Tensor:
    """bool `[rows, words * 32]` on `device`, True = forbidden."""
    import torch

    # Pinned, so that the copy is queued behind the forward pass and nobody waits for it; torch keeps a pinned block
    # from being used again before its copy is done.
    packed = torch.empty(len(bitmask), len(bitmask[0]), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.stack(list(bitmask), out=packed.numpy())
    packed = packed.to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).reshape(len(bitmask), -1) == 0
