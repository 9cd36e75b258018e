"""EngineConfig and LoadOptions: every option of one engine and of its model, with its
default value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from guided.limits import Range, check_ranges

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `guided serve --help` describes the fields.
    `chat_template` is the path of a file."""

    tokenizer: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1

    RANGES: ClassVar[Mapping[str, Range]] = {"tensor_parallel_size": Range(1)}

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Limits and sizes of one engine.

    Args:
        max_num_seqs: maximum number of sequences in one step. With recurrent layers, at
            most as many as have room for their states.
        max_num_batched_tokens: maximum number of tokens in one step. Longer prompts are
            prefilled in chunks. None: 64 on a CPU, so that prompts delay decoding
            little, or 1024 while no sequence is decoding, and 4096 elsewhere. At least
            `max_num_seqs` plus a block.
        max_model_len: maximum length of prompt and output together. None: the model's
            own limit.
        block_size: tokens per block of the KV cache.
        num_blocks: blocks of the KV cache. None: as many as `kv_cache_bytes` holds.
        kv_cache_bytes: memory for the KV cache and recurrent states, in each process of
            tensor parallelism. None: on a GPU, what the largest step leaves free; else
            a quarter of the free memory, at most 4 GiB.
        enable_prefix_caching: keep blocks for prompts that begin alike. Outputs are the
            same, except for rounding. Off for models with recurrent layers.
        enforce_eager: do without CUDA graphs of decode steps: the engine starts sooner,
            and decodes more slowly.
        seed: seed of the engine. A request without a seed derives its own from it.
        logits_processors: custom logits processors in their order: classes, or
            `module:Class` (docs/logits-processors.md).
        logits_processor_plugins: load those of installed packages too; they run before
            the others.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int = 0
    logits_processors: tuple[str | type, ...] = ()
    logits_processor_plugins: bool = True

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(
            ("max_num_seqs", "max_num_batched_tokens", "max_model_len"), Range(1)
        ),
        **dict.fromkeys(("block_size", "num_blocks", "kv_cache_bytes"), Range(1)),
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    def tokens_per_step(self, on_cpu: bool, *, delays_decoding: bool = True) -> int:
        """Return the maximum number of tokens in one step, which delays sequences that
        are decoding or not."""
        default = 4096
        if on_cpu:
            if delays_decoding:
                default = 64
            else:
                default = 1024
        return max(
            self.max_num_batched_tokens or default, self.max_num_seqs + self.block_size
        )
