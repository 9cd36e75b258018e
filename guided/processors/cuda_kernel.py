"""CudaKernel: launches the kernel that writes -inf, on masks in pinned memory.

Functions import torch themselves: it takes 3 seconds and 170 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guided.processors.pinned_masks import pinned_end

if TYPE_CHECKING:
    import torch

MaskLines: TypeAlias = tuple[NDArray[np.int32], NDArray[np.intp]]
"""Masks of one table: the table, int32 `[slots, words]`, and their lines, each
contiguous."""


class CudaKernel:
    """Keeps the buffers of launches. The host goes on at once. Use it from one
    thread."""

    def __init__(self) -> None:
        self._copies: torch.Tensor | None = None
        """Copies of masks that do not lie in pinned memory, int32 `[rows, words]`,
        pinned."""
        self._launched: Any = None
        """The event after the last launch."""

    def wait(self) -> None:
        """Wait until the masks were read."""
        if self._launched is not None:
            self._launched.synchronize()
            self._launched = None

    def launch(
        self,
        logits: torch.Tensor,
        masks: Sequence[MaskLines],
        rows: Sequence[int] | NDArray[np.intp],
    ) -> None:
        """Launch the kernel. Masks that the device does not read where they lie are
        copied first."""
        import torch

        from guided.processors.mask_kernel import launch

        self.wait()
        words = masks[0][0].shape[1]
        if self._copies is None or len(self._copies) < len(rows):
            self._copies = torch.empty(
                max(64, 2 * len(rows)), words, dtype=torch.int32, pin_memory=True
            )
        copies = self._copies.numpy()
        addresses = copies.ctypes.data + np.arange(len(rows)) * copies.strides[0]
        end = 0
        for table, lines in masks:
            start = end
            end += len(lines)
            first = table.ctypes.data
            wanted = first + lines * table.strides[0]
            is_pinned = wanted < pinned_end(first)
            addresses[start:end][is_pinned] = wanted[is_pinned]
            copies[start:end][~is_pinned] = table[lines[~is_pinned]]
        plan = torch.from_numpy(np.column_stack((addresses, rows))).pin_memory()
        with torch.cuda.device(logits.device):
            launch(logits, plan.to(logits.device, non_blocking=True), words)
        self._launched = end_of_work(logits)


def end_of_work(logits: torch.Tensor) -> Any:
    """Return a `torch.cuda.Event` after all work on `logits` so far. None: they are not
    on CUDA."""
    if not logits.is_cuda:
        return None
    import torch

    return torch.cuda.current_stream(logits.device).record_event()
