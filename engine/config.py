"""EngineConfig: what one engine is built with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits and sizes of one engine.

    Args:
        max_num_seqs: sequences in one step, at the most.
        max_num_batched_tokens: tokens in one step, at the most (prompts and decoded tokens together); raised to
            `max_model_len` where it is less, for a preempted sequence is prefilled again as a whole.
        max_model_len: prompt and output together; None is the model's own limit.
        block_size: tokens in one block of the KV cache.
        num_blocks: blocks of the KV cache; None sizes it from `kv_cache_bytes`.
        kv_cache_bytes: memory for the KV cache; None is a share of what is free (`kv_cache.plan_blocks`), and never
            more than `max_num_seqs` sequences of `max_model_len` can use.
        cpu_threads: torch's threads, on a CPU. None is one where the model is too small for more to pay, else torch's
            own choice. (OpenMP's barriers spin: where something else wants the cores, such as mask actors, a small
            model was seen to run 20 times slower with two threads than with one.)
        seed: from which requests without a seed derive theirs.
        overlap: hand the masks' work to the pool before the forward pass. Off: right before the masks are applied.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    cpu_threads: int | None = None
    seed: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
            "cpu_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
