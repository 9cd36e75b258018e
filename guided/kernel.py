"""Writing -inf over the logits that token bitmasks forbid, in place or into other memory, where the logits are.

On the CPU, the method for a row depends on a sample of its mask. (Time per row of 131,072 tokens, float32, 64 rows, one
thread: `python -m benchmarks.apply_kernel`.)

- tight, nearly all forbidden: save the allowed logits, fill the row with -inf, restore them: 36 us;
- loose, nearly all allowed: xgrammar's kernel, which touches each forbidden logit: 15 us (440 us for a tight row);
- others, rare: a table from eight bits of the mask to eight words of the row: 46 us.

Torch is imported in the functions that call it: a process that only computes masks saves 3 seconds and 170 MB.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guided.pool import ReadyMasks

if TYPE_CHECKING:
    import torch

Masks: TypeAlias = NDArray[np.int32] | Sequence[NDArray[np.int32]] | Sequence[ReadyMasks]
"""int32 `[rows, words]`, or a sequence of `[words]`, or the parts of a step's masks, one after the other."""
Bits: TypeAlias = NDArray[Any]
"""Logits as unsigned integers of the same width. As such, only a NaN with its sign set is larger than -inf."""

logger = logging.getLogger(__name__)
_cuda_failed = False
"""The kernel on CUDA has raised an exception."""
_MINUS_INFINITY = {"float32": np.uint32(0xFF800000), "bfloat16": np.uint16(0xFF80), "float16": np.uint16(0xFC00)}
_TIGHT = 3
"""Minimum number of the four sampled 64-bit words that allow nothing."""
_LOOSE = 240
"""Minimum number of the 256 sampled tokens that are allowed."""
_LEAST_WORDS = 128
"""Minimum number of words of a row that is sampled. On shorter rows, xgrammar's kernel wrote wrong values."""
_WINDOW = 1024
"""Number of neighbouring logits in which `_rows_to_clamp` counts allowed ones above the minimum."""
_PLENTY = 512
"""A row with at least this many allowed logits above the minimum in the window keeps its logits below the minimum."""
_LEAD_WORDS = 64
"""Number of words at the beginning of the rows that are checked for tokens that all rows forbid. Special tokens come
first in many vocabularies, and no constraint allows them."""
_LEAD_ROWS = 16
"""Minimum number of rows for which one write forbids these tokens in all rows."""


def apply_bitmask(
    logits: torch.Tensor,
    bitmask: Masks,
    rows: Sequence[int] | NDArray[np.intp],
    out: torch.Tensor | None = None,
    least: float | None = None,
) -> None:
    """Write -inf over the forbidden logits, in place.

    Args:
        logits: float `[batch, padded_vocab_size]`, any device. On CUDA: float32, bfloat16 or float16, each row
            contiguous.
        bitmask: `len(rows)` rows; row i belongs to `logits[rows[i]]`. They may be overwritten as soon as this returns.
        rows: distinct rows of `logits`.
        out: like `logits`; receives all of `rows` instead of it.
        least: minimum of an allowed logit, except in rows with hundreds of allowed logits above it.

    Columns of `logits` beyond the bitmask are forbidden too. A forbidden NaN may stay one.

    On CUDA, after an exception (no Triton, no compiler, another type or layout) this process uses torch instead.
    """
    if not len(rows):
        return
    rows = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)
    dtype = str(logits.dtype).removeprefix("torch.")
    target = logits if out is None else out
    on_cpu = logits.device.type == "cpu" and dtype in _MINUS_INFINITY
    if on_cpu and logits.stride(1) == target.stride(1) == 1:
        _apply_on_cpu(logits, bitmask, rows, _MINUS_INFINITY[dtype], target, least)
        return
    if out is not None or least is not None:
        taken = logits[rows]
        target[rows] = taken if least is None else taken.clamp_(min=least)
    if logits.device.type == "cuda":
        _apply_on_cuda_or_by_torch(target, bitmask, rows)
    else:
        _apply_by_torch(target, bitmask, rows)


def load_loose_kernel() -> None:
    """Load xgrammar's kernel on a thread (0.3 s, 23 MB). Until then, loose rows are written like the others."""
    if "xgrammar" not in sys.modules:
        threading.Thread(target=__import__, args=("xgrammar",), name="load-xgrammar", daemon=True).start()


# on the CPU


def _apply_on_cpu(
    logits: torch.Tensor, masks: Masks, rows: list[int], minus_infinity: Any, out: torch.Tensor, least: float | None
) -> None:
    import torch

    block = _gathered(masks, rows)
    covered = block.shape[1] * 32
    if covered < logits.shape[1]:
        out[rows, covered:] = -torch.inf
        logits, out = logits[:, :covered], out[:, :covered]
    tight, loose, others = _sorted_by_density(block, rows)
    bits, target = _bits(logits), _bits(out)
    ceiling = None if least is None else _bits_of(least, logits.dtype)
    clamped = [] if ceiling is None else _rows_to_clamp(bits, block, loose + others, ceiling)
    if loose:
        for row in loose:
            if ceiling is not None and row in clamped:
                np.minimum(bits[row], ceiling, out=target[row])
            elif out is not logits:
                target[row] = bits[row]
        lead = _lead(block) if len(loose) == len(logits) >= _LEAD_ROWS else 0
        if lead:  # with numpy: torch's threads wait for each other, for milliseconds if a core is busy
            target[:, : lead * 32] = minus_infinity
        rest, size = torch.from_numpy(block[:, lead:]), logits.shape[1] - lead * 32
        apply_loose = sys.modules["xgrammar"].apply_token_bitmask_inplace
        apply_loose(out[:, lead * 32 :], rest, vocab_size=size, indices=loose)
    floors = _floors_of_byte(minus_infinity)
    if tight:
        _fill_and_restore(bits, target, block, tight, floors, ceiling)
    if others:
        _raise_to_floor(bits, target, block, set(others).difference(clamped), floors, None)
        _raise_to_floor(bits, target, block, set(others).intersection(clamped), floors, ceiling)


def _rows_to_clamp(bits: Bits, block: NDArray[np.int32], rows: list[int], ceiling: Any) -> list[int]:
    """Return the rows that may have fewer than `_PLENTY` allowed logits above the minimum in their window.

    Args:
        ceiling: the minimum, as in `Bits`.
    """
    if not rows or bits.shape[1] <= 4 * _WINDOW:  # clamping a short row takes less time than counting
        return rows
    first = bits.shape[1] // 64 * 32
    more = np.count_nonzero(bits[rows, first : first + _WINDOW] < ceiling, axis=1).tolist()
    masks = block[:, first // 32 : (first + _WINDOW) // 32]
    allowed = [int.from_bytes(masks[row].tobytes(), "little").bit_count() for row in rows]
    return [row for row, one, other in zip(rows, more, allowed, strict=True) if one + other - _WINDOW < _PLENTY]


@cache
def _bits_of(value: float, dtype: torch.dtype) -> Any:
    import torch

    return _bits(torch.tensor([[value]], dtype=dtype))[0, 0]


def _bits(logits: torch.Tensor) -> Bits:
    import torch

    signed, unsigned = (torch.int32, np.uint32) if logits.element_size() == 4 else (torch.int16, np.uint16)
    bits: Bits = logits.view(signed).numpy(force=True).view(unsigned)
    return bits


def _gathered(masks: Masks, rows: list[int]) -> NDArray[np.int32]:
    """Return `[max(rows) + 1, words]`, where row `rows[i]` is mask i: xgrammar's kernel has one index for both."""
    if isinstance(masks, np.ndarray) and masks.strides[1] == masks.itemsize and rows == list(range(len(masks))):
        return masks
    block = np.empty((max(rows) + 1, _words(masks)), np.int32)
    _copy(masks, block, rows)
    return block


def _words(masks: Masks) -> int:
    return int((masks[0].masks if isinstance(masks[0], ReadyMasks) else masks[0]).shape[-1])


def _copy(masks: Masks, block: NDArray[np.int32], rows: list[int]) -> None:
    """Copy mask i to `block[rows[i]]`."""
    done = 0
    for part in masks:
        if isinstance(part, ReadyMasks):
            count = len(part.slots)
            block[rows[done : done + count]] = part.masks[part.slots]
        else:
            count, block[rows[done]] = 1, part
        done += count


def _sorted_by_density(block: NDArray[np.int32], rows: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows that are tight, loose, and neither, by a sample of their words."""
    words = block.shape[1]
    if words < _LEAST_WORDS:
        return [], [], rows
    ways: tuple[list[int], list[int], list[int]] = [], [], []
    loaded = hasattr(sys.modules.get("xgrammar"), "apply_token_bitmask_inplace")
    # Python integers: more calls of numpy take longer, even for 64 rows.
    sample: list[list[int]] = block.take(_sampled(words), 1).view(np.uint64).tolist()
    for row in rows:
        words_of_64 = sample[row]
        tight = words_of_64.count(0) >= _TIGHT
        loose = loaded and not tight and sum(map(int.bit_count, words_of_64)) >= _LOOSE
        ways[0 if tight else 1 if loose else 2].append(row)
    return ways


@cache
def _sampled(words: int) -> NDArray[np.int64]:
    """Return the indices of the eight sampled words of a row: four pairs, each within a cache line."""
    places = np.arange(4)[:, None] * (words // 4) + words // 8
    return (places + np.arange(2)).reshape(-1)


def _lead(block: NDArray[np.int32]) -> int:
    """Return how many of the first `_LEAD_WORDS` words all rows forbid."""
    start = block[0, :_LEAD_WORDS].tobytes()
    lead = (len(start) - len(start.lstrip(b"\0"))) // block.itemsize
    return 0 if block[:, :lead].any() else lead


def _fill_and_restore(
    bits: Bits, target: Bits, block: NDArray[np.int32], rows: list[int], floors: Bits, ceiling: Any
) -> None:
    """Save the words with something allowed, fill the rows, restore the words: all rows at once.

    Args:
        ceiling: minimum of an allowed logit, or None. (As an integer, a smaller negative float is larger.)
    """
    whole = bits.shape[1] // 32
    if len(rows) == len(block):
        at, word = np.nonzero(block[:, :whole] != 0)
    else:
        at, word = np.nonzero(block[rows, :whole] != 0)
        at = np.asarray(rows)[at]
    kept = floors.take(block[at, word].view(np.uint8), 0).reshape(-1, 32)
    saved = _by_word(bits, whole)[at, word]
    if ceiling is not None:
        np.minimum(saved, ceiling, out=saved)
    np.maximum(kept, saved, out=kept)
    for row in rows:
        target[row, : whole * 32] = floors[0, 0]
    _by_word(target, whole)[at, word] = kept
    _raise_to_floor(bits, target, block, rows, floors, ceiling, whole)


def _by_word(bits: Bits, words: int) -> Bits:
    return bits[:, : words * 32].reshape(len(bits), words, 32)


def _raise_to_floor(
    bits: Bits,
    target: Bits,
    block: NDArray[np.int32],
    rows: Collection[int],
    floors: Bits,
    ceiling: Any,
    start: int = 0,
) -> None:
    """Write the rows one by one from word `start` on, for any mask."""
    width = bits.shape[1] - start * 32
    if not width or not rows:
        return
    floor = np.empty(((block.shape[1] - start) * 4, 8), floors.dtype)
    for row in rows:
        np.take(floors, block[row, start:].view(np.uint8), axis=0, out=floor, mode="clip")
        source, written = bits[row, start * 32 :], target[row, start * 32 :]
        if ceiling is not None:
            source = np.minimum(source, ceiling, out=written)
        np.maximum(source, floor.reshape(-1)[:width], out=written)


@cache
def _floors_of_byte(minus_infinity: Any) -> Bits:
    """Return `[256, 8]`: for eight bits of a mask, -inf where forbidden, 0 where allowed."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, minus_infinity.dtype.type(0), minus_infinity)


# on CUDA


def _apply_on_cuda_or_by_torch(logits: torch.Tensor, masks: Masks, rows: list[int]) -> None:
    global _cuda_failed
    if not _cuda_failed:
        try:
            _apply_on_cuda(logits, masks, rows)
            return
        except Exception:
            _cuda_failed = True
            logger.exception("the kernel of masks failed on %s: this process goes on with torch", logits.device)
    _apply_by_torch(logits, masks, rows)


def _apply_on_cuda(logits: torch.Tensor, masks: Masks, rows: list[int]) -> None:
    """Copy the masks on a side stream, which doesn't wait for the forward pass; then run xgrammar's kernel.

    There is one copy, from pinned memory. The host waits for nothing: torch's allocators reuse neither block before the
    copy and the kernel are done. Gathering the masks into the pinned block takes a microsecond per row, and frees the
    workers' rows at once.

    This has not run on a GPU yet: its bookkeeping is tested on a CPU, its speed is not known.
    """
    import torch
    import xgrammar

    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or logits.stride(1) != 1:
        raise ValueError(
            f"logits on CUDA must be float32, bfloat16 or float16 with contiguous rows, not {logits.dtype}"
        )
    device = logits.device
    words = _words(masks)
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(device), _side_stream(device)
        pinned = _pinned(len(rows), words + 1)
        packed = pinned.numpy()
        _copy(masks, packed[:, :words], list(range(len(rows))))
        packed[:, words] = rows  # copied together with their masks
        with torch.cuda.stream(side):
            sent = pinned.to(device, non_blocking=True)
        current.wait_stream(side)
        sent.record_stream(current)
        bitmask, index = _spread(sent, rows, len(logits))
        size = min(words * 32, logits.shape[1])
        xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=size, indices=index)
        if size < logits.shape[1]:
            where = torch.arange(len(logits), device=device) if index is None else index.long()
            logits[:, size:].index_fill_(0, where, float("-inf"))


def _spread(sent: torch.Tensor, rows: list[int], batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masks and index for xgrammar's kernel: row `rows[i]` is mask i; no index where that is every row in order.

    Args:
        sent: int32 `[rows, words + 1]`; the last column is the row of the logits.
    """
    masks, index = sent[:, :-1], sent[:, -1].contiguous()
    if rows == list(range(batch)):
        return masks, None
    if rows == list(range(len(rows))):
        return masks, index
    return masks.new_empty(max(rows) + 1, masks.shape[1]).index_copy_(0, index.long(), masks), index


def _pinned(rows: int, columns: int) -> torch.Tensor:
    import torch

    return torch.empty(rows, columns, dtype=torch.int32, pin_memory=True)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# anywhere else


def _apply_by_torch(logits: torch.Tensor, masks: Masks, rows: list[int]) -> None:
    """Write -inf with torch: for any type, layout and device."""
    import torch

    index = torch.tensor(rows, device=logits.device)
    block = np.empty((len(rows), _words(masks)), np.int32)
    _copy(masks, block, list(range(len(rows))))
    packed = torch.from_numpy(block).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((packed.unsqueeze(-1) >> shifts) & 1).reshape(len(rows), -1) == 0
    width = min(forbidden.shape[1], logits.shape[1])
    picked = logits.index_select(0, index)
    picked[:, :width].masked_fill_(forbidden[:, :width], float("-inf"))
    picked[:, width:] = float("-inf")
    logits.index_copy_(0, index, picked)
