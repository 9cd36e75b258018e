"""VllmConfig: describes the engine to a logits processor, with the field names of vLLM's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ModelConfig", "SchedulerConfig", "VllmConfig"]


@dataclass(frozen=True)
class ModelConfig:
    model: str = ""
    """Local directory or hub name."""
    max_model_len: int = 0
    """Maximum length of prompt and output together, in tokens."""
    vocab_size: int = 0
    """Columns of the logits, including padding."""
    dtype: torch.dtype = torch.float32
    """Of the weights; logits are float32."""
    hf_config: Any = None
    """transformers' config of the language model."""

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 0
    """Maximum number of rows of the logits. Every index is below it."""
    max_num_batched_tokens: int = 0


@dataclass(frozen=True)
class VllmConfig:
    """The part of `vllm.config.VllmConfig` that logits processors read. The last two fields are additions."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    tokenizer: Any = None
    """transformers' tokenizer."""
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own stop tokens."""
