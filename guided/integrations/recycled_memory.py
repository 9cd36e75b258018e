"""Memory for tensors that somebody else lets go of: used again once they have, and not before.

A tensor of 32 MB in fresh memory takes longer to be mapped, page by page, than to be written.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["RecycledMemory"]

_KEPT = 2
"""Blocks: who asks for the next tensor still has the last one."""


class RecycledMemory:
    """Tensors of one size at a time, on the CPU; elsewhere torch's allocator does as much by itself."""

    def __init__(self) -> None:
        self._lent: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        """With what lives as long as a tensor's memory is used: by it, or by any view of it."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, type and device, contiguous, of undefined content."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        size = tensor.numel() * tensor.element_size()
        self._lent = [(used, memory) for used, memory in self._lent if memory.nbytes == size]
        free = next((index for index, (used, _) in enumerate(self._lent) if used() is None), None)
        memory = np.empty(size, np.uint8) if free is None else self._lent.pop(free)[1]
        user = memory[:]  # the tensor holds on to this object, and nobody else does
        self._lent = [*self._lent, (weakref.ref(user), memory)][-_KEPT:]
        return torch.from_numpy(user).view(tensor.dtype).view(tensor.shape)

    def clear(self) -> None:
        """Let go of what is kept; tensors that are still used stay as they are."""
        self._lent.clear()
