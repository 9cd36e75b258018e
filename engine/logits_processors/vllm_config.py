"""VllmConfig: what a logits processor is told of its engine, in the places where vLLM's own config has it."""

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
    """Prompt and output together, in tokens."""
    vocab_size: int = 0
    """Columns of the logits, padding included."""
    dtype: torch.dtype = torch.float32
    """Of the weights; logits are float32."""
    hf_config: Any = None
    """transformers' config of the language model."""

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 0
    """Rows of the logits, at the most; every index is below it."""
    max_num_batched_tokens: int = 0


@dataclass(frozen=True)
class VllmConfig:
    """A stand-in for `vllm.config.VllmConfig`, as far as logits processors read it; the last two fields are ours."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    tokenizer: Any = None
    """The tokenizer itself, transformers'."""
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own stop tokens."""
