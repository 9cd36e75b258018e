"""RevisedAdapter: runs a processor of the revised model (RFC 25389) as one of vLLM V1's model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits_processors.interface import BatchUpdate, LogitsProcessor, VllmConfig, process_dict_updates
from engine.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class _Request:
    """A request with its index, and what `token_ids` has of it."""

    index: int
    prompt: list[int]
    output: list[int]
    """By reference."""
    written: list[int] = field(default_factory=list)
    """Output tokens in `token_ids`."""


class RevisedAdapter(LogitsProcessor):
    """Gives each request of the batch a fixed index, and keeps the tokens of all in one array.

    Args:
        kind: the processor's class. It defines `add_request`.
    """

    def __init__(
        self, kind: type[LogitsProcessor], vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        count = vllm_config.scheduler_config.max_num_seqs
        self._processor: Any = kind(vllm_config, device, is_pin_memory)
        self._requests: dict[int, _Request] = {}
        """By row."""
        self._free = list(range(count))[::-1]
        self._token_ids: NDArray[np.int32] = np.zeros((count, vllm_config.model_config.max_model_len), dtype=np.int32)
        self._seq_lens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._mapping: list[int] | None = None

    def is_argmax_invariant(self) -> bool:
        return bool(self._processor.is_argmax_invariant())

    def apply(self, logits: torch.Tensor) -> Any:
        return self._processor.apply(logits)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            for row in (*batch_update.removed, *(row for row, *_ in batch_update.added)):
                self._leave(row)
            process_dict_updates(self._requests, batch_update, self._enter)
        for request in self._requests.values():
            self._write(request)
        mapping = [request.index for _, request in sorted(self._requests.items(), key=lambda one: one[0])]
        same, self._mapping = mapping == self._mapping, mapping
        self._processor.update_state(None if same else np.array(mapping, np.int64), self._token_ids, self._seq_lens)

    def _enter(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Request:
        request = _Request(self._free.pop(), prompt_ids or [], output_ids)
        self._token_ids[request.index, : len(request.prompt)] = request.prompt
        self._processor.add_request((params, len(request.prompt), request.index))
        return request

    def _leave(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is not None:
            self._free.append(request.index)
            self._seq_lens[request.index] = 0
            self._processor.remove_request(request.index)

    def _write(self, request: _Request) -> None:
        """Write the output tokens that are new, or all, if tokens were removed or replaced."""
        written, output = request.written, request.output
        if output[: len(written)] != written:
            written.clear()
        start = len(request.prompt) + len(written)
        end = len(request.prompt) + len(output)
        self._token_ids[request.index, start:end] = output[len(written) :]
        self._seq_lens[request.index] = end
        written += output[len(written) :]
