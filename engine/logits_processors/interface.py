"""The two programming models of batch-level logits processors, with vLLM's names: the
model of V1 (docs/features/custom_logitsprocs.md), and the revised model of RFC 25389
(https://github.com/vllm-project/vllm/issues/25389).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams

State = TypeVar("State")


@dataclass(frozen=True)
class ModelConfig:
    """`vocab_size` is the number of columns of the logits, padding included; `dtype` is
    the type of the weights."""

    model: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    dtype: torch.dtype = torch.float32
    hf_config: Any = None

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class SchedulerConfig:
    """The logits have at most `max_num_seqs` rows, and every index is below this
    number."""

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


@dataclass(frozen=True)
class VllmConfig:
    """The part of `vllm.config.VllmConfig` that logits processors read, and
    transformers' tokenizer."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    tokenizer: Any = None


class MoveDirectionality(Enum):
    """Whether a move goes one way or both ways, as in vLLM."""

    UNIDIRECTIONAL = auto()
    """i2 is overwritten, and i1 is empty afterwards."""
    SWAP = auto()


AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt token ids, and output token ids, to which the engine
appends. For V1's model."""

MovedRequest = tuple[int, int, MoveDirectionality]
"""i1, i2, and the direction."""

RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor]
    | Callable[[list[int], list[int], Tensor], Tensor]
)
"""A request-level processor: ([prompt ids,] output ids, logits `[vocab]`) -> logits
`[vocab]`."""


@dataclass(frozen=True)
class BatchUpdate:
    """The difference to the previous batch: apply `removed`, then `added`, then
    `moved`, each in order. An added request replaces the one at its index, which is not
    in `removed`. `batch_size` is the new number of requests."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """A batch-level logits processor. One instance serves an engine for its lifetime.

    A class that defines `add_request` follows the revised model, in which a request has
    an index until it ends or is preempted. Such a class has these methods:

    - `add_request((params, prompt length, index))` and `remove_request(index)`.
    - `update_state(index_mapping, token_ids, seq_lens)`, called before each forward
      pass. `index_mapping`, int64 `[rows]`, is the index of each row's request, or None
      if unchanged. `token_ids`, int32 `[max_num_seqs, max_model_len]`, is the prompt
      and output at each index, valid during this call only. `seq_lens`, int32
      `[max_num_seqs]`, is the number of tokens at each index.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request before it is admitted, in any thread. A `ValueError` rejects
        it with HTTP 400."""
        return None

    @abstractmethod
    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        """`device` is the device of the logits. `is_pin_memory`: whether pinned memory
        makes copies to it faster."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change the logits, float32 `[batch size, vocab]`, in place or not, and return
        them in the same shape."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the processor never changes which token has the highest logit.
        It then runs after mask and temperature, and not at all if all rows are greedy.
        Called once."""

    @abstractmethod
    def update_state(self, *_args: Any, **_kwargs: Any) -> None:
        """Update the processor's state, before each forward pass. In V1's model, the
        only argument is `batch_update: BatchUpdate | None`; None means that the batch
        has not changed."""


def is_revised(kind: type[LogitsProcessor]) -> bool:
    """Return whether a class follows the revised model."""
    return hasattr(kind, "add_request")


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Update a processor's state by index, and return whether it has changed.
    `new_state(params, prompt ids, output ids)` returns the state of an added request,
    or None if the request does not use the processor."""
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
        ours = req_entries.pop(first, None)
        theirs = req_entries.pop(second, None)
        changed |= ours is not None or theirs is not None
        if ours is not None:
            req_entries[second] = ours
        if theirs is not None and direction is MoveDirectionality.SWAP:
            req_entries[first] = theirs
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one callable per request. Subclasses define `is_argmax_invariant` and
    `new_req_logits_processor`. The result of a callable should depend only on its
    arguments, because preempted sequences get a new callable."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}
        """Row -> the callable, bound to the lists of token ids."""

    @abstractmethod
    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> RequestLogitsProcessor | None:
        """Return the callable of a new sequence, or None. A callable with two
        parameters gets the output ids and the logits. A callable with three parameters
        gets the prompt ids before these."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def bound(
            params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
        ) -> Any:
            callable_ = self.new_req_logits_processor(params)
            if callable_ is None:
                return None
            with_prompt = len(inspect.signature(callable_).parameters) == 3
            return partial(
                cast(Any, callable_), *([prompt_ids] if with_prompt else []), output_ids
            )

        process_dict_updates(self.req_info, batch_update, bound)

    def apply(self, logits: Tensor) -> Tensor:
        for row, of_row in self.req_info.items():
            before = logits[row]
            after = of_row(before)
            if after is not before:
                logits[row] = after
        return logits
