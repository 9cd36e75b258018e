"""The programming model of batch-level logits processors: vLLM V1's, name by name, so that what is written for it runs.

A processor sees the batch as a list: index i of it is row i of the logits. What changes about the list reaches it as a
`BatchUpdate`, before the forward pass; the logits reach it after it.
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
    """What happens to the second index of a move."""

    UNIDIRECTIONAL = auto()
    """i1 -> i2: i2 is overwritten, and nobody is at i1 afterwards."""
    SWAP = auto()
    """i1 <-> i2."""


RemovedRequest = int
"""The index of a request that is gone."""

AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt token ids, output token ids: the last is the running list, by reference, to be read only.
It is not empty where a sequence comes back that was preempted or parked."""

MovedRequest = tuple[int, int, MoveDirectionality]
"""i1, i2, and whether both move."""

RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""A request-level processor: ([prompt ids,] output ids, logits `[vocab]`) -> logits `[vocab]`."""


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch differs from the last one: apply `removed`, then `added`, then `moved`, each in its order.

    An added request replaces whoever is at its index; such an index is not in `removed`, so that a processor may take
    additions before removals. Indices are below the engine's `max_num_seqs`, those in between included.
    """

    batch_size: int
    """Requests in the batch, after all of it."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """A batch-level logits processor. One instance serves an engine for as long as it lives."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Look at a request before it is taken in; may be called from any thread.

        Raises:
            ValueError: it can't be served; the message is what the user reads (HTTP 400).
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """
        Args:
            device: where the logits are.
            is_pin_memory: whether pinned memory speeds copies to it up.
        """
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the logits, float32 `[batch size, vocab]`, in place or not, and return them in the same shape."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True where it never changes which token has the highest logit. Asked once, at start-up: then it runs after
        the temperature, on the masked logits, and not at all where everybody is greedy."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each forward pass; None where the batch is that of the last call."""
        raise NotImplementedError


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a dict from index to a processor's own state, of those requests alone that it is for.

    Args:
        new_state: (parameters, prompt ids, output ids) of an added request to its state, or None.

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
