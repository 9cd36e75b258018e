"""The revised programming model of vLLM's RFC 25389: a request keeps its index, so there are no moves to follow."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from engine.logits_processors.interface import BatchProcessor
from engine.sampling_params import SamplingParams

__all__ = ["RevisedLogitsProcessor"]


class RevisedLogitsProcessor(BatchProcessor):
    """A batch-level logits processor in which each request has a fixed index, and a batch maps rows to indices.

    (https://github.com/vllm-project/vllm/issues/25389, comment of 2025-09-30.) Indices are below the engine's
    `max_num_seqs` and are reused. A parked sequence keeps its index. A preempted sequence is removed, and added again
    when it returns, possibly with another index.
    """

    @abstractmethod
    def add_request(self, index: int, params: SamplingParams, prompt_len: int) -> None:
        """Add a request at `index`. Its first `prompt_len` tokens are its prompt."""
        raise NotImplementedError

    @abstractmethod
    def remove_request(self, index: int) -> None:
        """Remove the request at `index`."""
        raise NotImplementedError

    @abstractmethod
    def update_state(
        self, index_mapping: NDArray[np.int64] | None, token_ids: NDArray[np.int32], seq_lens: NDArray[np.int32]
    ) -> None:
        """Follow the batch. Called before each forward pass.

        Args:
            index_mapping: int64 `[rows]`: index of each row's request. None: as in the last call.
            token_ids: int32 `[max_num_seqs, max_model_len]`: prompt and output of the request at each index. Read it
                during this call only, because the engine changes it. Do not write to it.
            seq_lens: int32 `[max_num_seqs]`: number of tokens at each index; 0 if the index is free.
        """
        raise NotImplementedError
