"""EngineConfig: what one engine is built with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from guided.limits import DEFAULT_LIMITS, Limits

__all__ = ["EngineConfig", "with_processors"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits and sizes of one engine.

    Args:
        max_num_seqs: sequences in one step, at the most.
        max_num_batched_tokens: tokens in one step, at the most (prompts and decoded tokens together); raised to
            `max_model_len` where it is less, for a preempted sequence is prefilled again as a whole.
        max_model_len: prompt and output together; None is the model's own limit, which it can't exceed.
        block_size: tokens in one block of the KV cache.
        num_blocks: blocks of the KV cache; None sizes it from `kv_cache_bytes`.
        kv_cache_bytes: memory for the KV cache; None is a share of what is free (`kv_cache.plan_blocks`), and never
            more than `max_num_seqs` sequences of `max_model_len` can use.
        cpu_threads: torch's threads, on a CPU. None is one where the model is too small for more to pay, else torch's
            own choice. (OpenMP's barriers spin: where something else wants the cores, such as mask actors, a small
            model was seen to run 20 times slower with two threads than with one.)
        seed: from which requests without a seed derive theirs.
        overlap: hand the masks' work to the pool before the forward pass. Off: right before the masks are applied.
        parking: where a mask misses its step's deadline, the others go on, and its sequence is sampled when it is
            there. Off: everybody waits for every mask. It changes when a token comes, never which.
        mask_deadline: seconds that a step waits for masks once its logits are there; resolved to about a millisecond.
            None is the larger of 1 ms and 5 % of the mean step.
        mask_limit: seconds that a mask may take, before its request fails with `MaskTimeout`. A pool that is started
            with the engine goes by it too, and ends the process that hangs.
        logits_processors: custom ones, in the order in which they run: classes, or `module:Class`
            (docs/logits-processors.md). Those of installed packages' entry points come before them.
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
    parking: bool = True
    mask_deadline: float | None = None
    mask_limit: float = 5.0
    limits: Limits = DEFAULT_LIMITS
    max_n: int | None = None
    logits_processors: tuple[str | type, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
            "cpu_threads",
            "max_n",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.mask_deadline is not None and not 0 <= self.mask_deadline < math.inf:
            raise ValueError(f"mask_deadline is {self.mask_deadline}; it must be a time in seconds, 0 or more")
        if not 0 < self.mask_limit < math.inf:
            raise ValueError(f"mask_limit is {self.mask_limit}; it must be a time in seconds, more than 0")


def with_processors(config: EngineConfig | None, logits_processors: Sequence[str | type]) -> EngineConfig | None:
    """The config with these logits processors after its own."""
    if not logits_processors:
        return config
    config = config or EngineConfig()
    return replace(config, logits_processors=(*config.logits_processors, *logits_processors))
