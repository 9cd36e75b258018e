"""Tensor parallelism: rank 0 computes the masks, and all ranks apply them.

Every rank samples from its own copy of the logits, so all ranks must mask alike, failed rows included. Each step has
one broadcast of the packed masks (16 KiB per row for 131,072 tokens), on the CPU (Gloo).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray


class Ranks:
    """The processes that mask the same batch.

    Args:
        group: their process group for tensors on the CPU.
        first: global rank of the process that computes the masks.
    """

    def __init__(self, group: Any, first: int) -> None:
        self._group = group
        self._first = first
        self.computes = torch.distributed.get_rank() == first
        """Whether this process computes the masks."""

    def share(self, bitmask: NDArray[np.int32]) -> None:
        """Broadcast `bitmask` from the computing process. It is overwritten in the others. Every process calls this."""
        torch.distributed.broadcast(torch.from_numpy(bitmask), self._first, self._group)
