"""The revised programming model of vLLM's RFC 25389: a request keeps its index, and nobody has to follow moves."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits_processors.vllm_config import VllmConfig
from engine.sampling_params import SamplingParams

__all__ = ["RevisedLogitsProcessor"]


class RevisedLogitsProcessor(ABC):
    """A batch-level logits processor that is told of requests by an index that stays theirs, and of a batch by which
    index is in which row. (https://github.com/vllm-project/vllm/issues/25389, comment of 2025-09-30.)

    Indices are below the engine's `max_num_seqs` and are given out again. A sequence that is parked keeps its index;
    one that is preempted is removed, and added again, maybe with another, when it comes back.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Look at a request before it is taken in; may be called from any thread.

        Raises:
            ValueError: it can't be served; the message is what the user reads (HTTP 400).
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """As `LogitsProcessor.is_argmax_invariant`."""
        raise NotImplementedError

    @abstractmethod
    def add_request(self, index: int, params: SamplingParams, prompt_len: int) -> None:
        """A request is at `index` from now on; its first `prompt_len` tokens are its prompt."""
        raise NotImplementedError

    @abstractmethod
    def remove_request(self, index: int) -> None:
        """It is gone."""
        raise NotImplementedError

    @abstractmethod
    def update_state(
        self, index_mapping: NDArray[np.int64] | None, token_ids: NDArray[np.int32], seq_lens: NDArray[np.int32]
    ) -> None:
        """Called before each forward pass.

        Args:
            index_mapping: int64 `[rows]`: the index of each row's request; None where it is that of the last call.
            token_ids: int32 `[max_num_seqs, max_model_len]`: prompt and output of the request at each index. To be read
                only, and now: it is the engine's, and goes on changing.
            seq_lens: int32 `[max_num_seqs]`: how many of them there are; 0 where nobody is.
        """
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the logits, float32 `[rows, vocab]`, in place or not, and return them in the same shape."""
        raise NotImplementedError
