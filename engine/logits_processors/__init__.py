"""Custom logits processors.

In a processor written for vLLM, replace the imports from `vllm`, `vllm.config`,
`vllm.sampling_params` and `vllm.v1.sample.logits_processor` by `from
engine.logits_processors import ...`.
"""

from engine.logits_processors.interface import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    VllmConfig,
    process_dict_updates,
)
from engine.sampling_params import SamplingParams

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "SamplingParams",
    "VllmConfig",
    "process_dict_updates",
]
