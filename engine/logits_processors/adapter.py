"""AdapterLogitsProcessor: runs one callable per request as a batch-level logits processor."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from engine.logits_processors.interface import (
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    VllmConfig,
    process_dict_updates,
)
from engine.sampling_params import SamplingParams

_OfRow = Callable[[torch.Tensor], torch.Tensor]


class AdapterLogitsProcessor(LogitsProcessor):
    """Subclass it and define `is_argmax_invariant` and `new_req_logits_processor`. A subclass with its own `__init__`
    calls `super().__init__(vllm_config, device, is_pin_memory)`.

    A sequence that was preempted gets a new callable with all its output ids, and a callable may be called again with
    the same ids. So its result should depend on the ids, not on the number of calls.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, _OfRow] = {}
        """By row: the callable, bound to the lists of token ids."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable of a new sequence, or None.

        It gets the output ids and the logits if it has two parameters, and the prompt ids before them if it has three.
        """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def _bound(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _OfRow | None:
        callable_ = self.new_req_logits_processor(params)
        if callable_ is None:
            return None
        with_prompt = len(inspect.signature(callable_).parameters) == 3
        ids = (prompt_ids, output_ids) if with_prompt else (output_ids,)
        return cast(_OfRow, partial(callable_, *ids))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, of_row in self.req_info.items():
            before = logits[row]
            after = of_row(before)
            if after is not before:
                logits[row] = after
        return logits
