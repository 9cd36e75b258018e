"""The programming model of batch-level logits processors. It is vLLM V1's, with the same names.

A processor sees the batch as a list: index i is row i of the logits. A `BatchUpdate` tells it before the forward pass
what has changed in the list. It gets the logits after the forward pass.
(vLLM: docs/features/custom_logitsprocs.md, vllm/v1/sample/logits_processor/interface.py.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import torch

from engine.logits_processors.vllm_config import VllmConfig
from engine.sampling_params import SamplingParams

__all__ = [
    "AddedRequest",
    "BatchProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RemovedRequest",
    "RequestLogitsProcessor",
    "process_dict_updates",
]

State = TypeVar("State")


class MoveDirectionality(Enum):
    """Whether a move goes one way or both ways."""

    UNIDIRECTIONAL = auto()
    """i1 -> i2: i2 is overwritten, and i1 is empty afterwards."""
    SWAP = auto()
    """i1 <-> i2."""


RemovedRequest = int
"""The index of a request that has left the batch."""

AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt token ids, output token ids. The engine appends to the last list: do not change it. It is
not empty if the sequence was preempted or parked before."""

MovedRequest = tuple[int, int, MoveDirectionality]
"""i1, i2, and the direction."""

RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""A request-level processor: ([prompt ids,] output ids, logits `[vocab]`) -> logits `[vocab]`."""


@dataclass(frozen=True)
class BatchUpdate:
    """The difference to the previous batch: apply `removed`, then `added`, then `moved`, each in order.

    An added request replaces the request at its index. That index is not in `removed`, so a processor may also apply
    additions before removals. All indices are below the engine's `max_num_seqs`, those of intermediate steps included.
    """

    batch_size: int
    """Number of requests in the new batch."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class BatchProcessor(ABC):
    """What both programming models share. One instance serves an engine for its lifetime."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request before it is admitted. May be called from any thread.

        Raises:
            ValueError: the request is rejected with HTTP 400 and this message.
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """
        Args:
            device: device of the logits.
            is_pin_memory: whether pinned memory makes copies to the device faster.
        """
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the logits, float32 `[batch size, vocab]`, in place or not, and return them in the same shape."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the processor never changes which token has the highest logit. Called once, at the start.

        Such a processor runs on the masked logits after the temperature, and not at all if all rows are greedy.
        """
        raise NotImplementedError


class LogitsProcessor(BatchProcessor):
    """A batch-level logits processor of vLLM V1's model."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch. Called before each forward pass. None: the batch has not changed."""
        raise NotImplementedError


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Update a dict from index to a processor's state, which has only the requests that use the processor.

    Args:
        new_state: returns the state of an added request from (parameters, prompt ids, output ids), or None.

    Returns:
        Whether the dict has changed.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        changed |= req_entries.pop(index, None) is not None or state is not None
        if state is not None:
            req_entries[index] = state
    if not req_entries:
        return changed
    for first, second, direction in batch_update.moved:
        ours, theirs = req_entries.pop(first, None), req_entries.pop(second, None)
        changed |= ours is not None or theirs is not None
        if ours is not None:
            req_entries[second] = ours
        if theirs is not None and direction is MoveDirectionality.SWAP:
            req_entries[first] = theirs
    return changed
