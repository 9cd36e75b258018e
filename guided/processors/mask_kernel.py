"""The kernel on CUDA that writes -inf over the logits that token bitmasks forbid,
wherever the masks lie.

It reads them by address: from the device, or from pinned memory of the host. It has not
run on a GPU yet. The tests run it in Triton's interpreter, and compile it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 256
"""Words of a mask that a program reads: one for each of its threads, so that reads over
the bus are large."""


@triton.jit  # type: ignore[untyped-decorator]
def write_minus_infinity(logits, plan, width, words, stride, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Mask `WORDS` words of a row: program (i, j) those from `j * WORDS` on in row
    `plan[i, 1]`."""
    place = plan + 2 * tl.program_id(0)
    mask = tl.load(place).to(tl.pointer_type(tl.int32))
    row = logits + tl.load(place + 1) * stride
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)[None, :]
    bits = tl.load(mask + word, mask=word < words, other=0)[:, None]
    column = word[:, None] * 32 + bit
    tl.store(
        row + column, float("-inf"), mask=((bits >> bit) & 1 == 0) & (column < width)
    )


def launch(logits: torch.Tensor, plan: torch.Tensor, words: int) -> None:
    """Launch the kernel on the current stream.

    Args:
        logits: float32, bfloat16 or float16 `[batch, width]`, each row contiguous.
            Columns beyond a mask are forbidden.
        plan: int64 `[rows, 2]` on the device: the address of each mask, int32
            `[words]`, and the row of `logits`.
    """
    width = logits.shape[1]
    grid = (len(plan), triton.cdiv(width, 32 * _WORDS))
    write_minus_infinity[grid](
        logits, plan, width, words, logits.stride(0), WORDS=_WORDS, num_warps=8
    )
