"""Tensor parallelism: rank 0 computes the masks, and all ranks use them.

Every rank samples from logits of its own, so all must mask alike, rows that fail included. One broadcast of the packed
masks a step (16 KiB a row at 131,072 tokens) makes sure of it: whoever is allowed one token only is told by its mask.
It goes through the host (Gloo), because there the masks are, and there they are needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

__all__ = ["TensorParallelRanks"]


class TensorParallelRanks:
    """`guided.integrations.vllm.masker.Ranks` over a process group.

    Args:
        group: for tensors on the host.
        first: the global rank of the process that computes.
    """

    def __init__(self, group: Any, first: int) -> None:
        self._group = group
        self._first = first
        self.computes = torch.distributed.get_rank() == first

    def share(self, bitmask: NDArray[np.int32]) -> None:
        torch.distributed.broadcast(torch.from_numpy(bitmask), self._first, self._group)
