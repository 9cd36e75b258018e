"""Write -inf over the logits that token bitmasks forbid.

There is one way for each device: numpy on a CPU (some 45 us for a row of 131,072
tokens), a Triton kernel on CUDA, torch for everything else. Functions import torch
themselves: it takes 3 seconds and 170 MB.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guided.processors.cuda_kernel import CudaKernel, MaskLines

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = NDArray[Any]
"""Logits as unsigned integers of the same width. As such, only a NaN with its sign set
is larger than -inf, and of two negative logits the lower one is the larger integer."""

logger = logging.getLogger(__name__)
_cuda_failed = False
"""Whether the kernel on CUDA has raised an exception in this process."""


def apply_bitmask(
    logits: torch.Tensor,
    masks: Iterable[NDArray[np.int32]],
    rows: Sequence[int] | NDArray[np.intp],
) -> None:
    """Write -inf over the forbidden logits, in place, as `BitmaskKernel.apply`.

    Args:
        masks: int32 `[words]`, contiguous, one for each of `rows`. They may be
            overwritten as soon as this returns.
    """
    kernel = BitmaskKernel()
    kernel.apply(logits, [(mask[None], np.zeros(1, np.intp)) for mask in masks], rows)
    kernel.wait()


class BitmaskKernel(CudaKernel):
    """Writes -inf over forbidden logits. On CUDA it keeps its buffers, and the host
    goes on at once.

    Use it from one thread.
    """

    def apply(
        self,
        logits: torch.Tensor,
        masks: Sequence[MaskLines],
        rows: Sequence[int] | NDArray[np.intp],
    ) -> None:
        """Write -inf over the forbidden logits, in place.

        Args:
            logits: float `[batch, padded_vocab_size]`, any device. On CUDA: float32,
                bfloat16 or float16, each row contiguous.
            masks: all with the same number of words. They must not be overwritten
                before `wait` returns.
            rows: distinct rows of `logits`, one for each mask.

        Columns of `logits` beyond the masks are forbidden too. A forbidden NaN may stay
        one. On CUDA, after an exception (no Triton, no compiler, another type or
        layout) this process uses torch instead. Raises `torch.OutOfMemoryError`, after
        which the next step tries the kernel again.
        """
        if not len(rows):
            return
        global _cuda_failed
        fits = logits.stride(1) == 1 and logits.element_size() in (2, 4)
        if fits and logits.is_cuda and not _cuda_failed:
            import torch

            try:
                self.launch(logits, masks, rows)
                return
            except torch.OutOfMemoryError:
                raise
            except Exception:
                _cuda_failed = True
                logger.exception(
                    "the kernel of masks failed on %s: this process goes on with torch",
                    logits.device,
                )
        rows = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)
        lines = [table[line] for table, lines in masks for line in lines]
        if fits and logits.device.type == "cpu":
            _apply_on_cpu(logits, lines, rows)
        else:
            _apply_by_torch(logits, lines, rows)


def _apply_on_cpu(
    logits: torch.Tensor, masks: list[NDArray[np.int32]], rows: list[int]
) -> None:
    """Take the maximum of each logit and -inf or 0, as integers."""
    width = min(len(masks[0]) * 32, logits.shape[1])
    if width < logits.shape[1]:
        logits[rows, width:] = float("-inf")
    floors = _floors_of_byte(logits.dtype)
    bits = _bits(logits)
    for mask, row in zip(masks, rows, strict=True):
        floor = floors.take(mask.view(np.uint8), axis=0).reshape(-1)
        np.maximum(bits[row, :width], floor[:width], out=bits[row, :width])


@cache
def _floors_of_byte(dtype: torch.dtype) -> Bits:
    """Return `[256, 8]`: for each byte of a mask, -inf where it forbids a token, 0
    where it allows one."""
    import torch

    minus_infinity = _bits(torch.tensor(float("-inf"), dtype=dtype))
    allowed = np.unpackbits(
        np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
    )
    return np.where(allowed == 1, np.zeros_like(minus_infinity), minus_infinity)


def _bits(logits: torch.Tensor) -> Bits:
    import torch

    bits: Bits = logits.view(
        torch.uint32 if logits.element_size() == 4 else torch.uint16
    ).numpy(force=True)
    return bits


def _apply_by_torch(
    logits: torch.Tensor, masks: list[NDArray[np.int32]], rows: list[int]
) -> None:
    """Write -inf with torch: for any type, layout and device."""
    import torch

    # A count beyond the masks adds zeros: tokens that are forbidden.
    allowed = np.unpackbits(
        np.stack(masks).view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    )
    forbidden = torch.from_numpy(allowed == 0).to(logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))
