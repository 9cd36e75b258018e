"""Memory for result tensors that is reused once the caller has dropped them.

Fresh memory for a tensor of 32 MB takes longer to be mapped, page by page, than to be written.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

_MIN_ELEMENTS = 1 << 18
"""Minimum number of elements. torch allocates smaller tensors."""
_MAX_BLOCKS = 2
"""Two, because the caller still holds the previous tensor when it asks for the next one."""


class RecycledMemory:
    """Tensors of one size at a time, on the CPU. On other devices torch's allocator reuses memory by itself."""

    def __init__(self) -> None:
        self._blocks: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        """(reference to a view, memory). The view lives as long as a tensor, or a view of it, uses the memory."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of the same shape, type and device. Its content is undefined."""
        if tensor.device.type != "cpu" or tensor.numel() < _MIN_ELEMENTS:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        size = tensor.numel() * tensor.element_size()
        self._blocks = [(user, memory) for user, memory in self._blocks if memory.nbytes == size]
        free = next((index for index, (user, _) in enumerate(self._blocks) if user() is None), None)
        memory = np.empty(size, np.uint8) if free is None else self._blocks.pop(free)[1]
        view = memory[:]  # only the tensor refers to this object
        self._blocks = [*self._blocks, (weakref.ref(view), memory)][-_MAX_BLOCKS:]
        return torch.from_numpy(view).view(tensor.dtype).view(tensor.shape)

    def clear(self) -> None:
        """Drop the blocks. Tensors that are in use stay valid."""
        self._blocks.clear()
