"""RayPoolOptions: every option of the Ray pool, with its default value.

`actors.RayPool`, `LLM`, `guided serve` and the Ray Serve application all take their pool options from this class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from guided.grammar_cache import DEFAULT_CACHE_BYTES
from guided.limits import CompileLimits, Range, check_ranges


@dataclass(frozen=True)
class RayPoolOptions:
    """How many mask actors a pool has, where they run and what each of them may take.

    Args:
        num_actors: mask actors. None: one for every four CPUs, at least 2, at most 8.
        address: address of a Ray cluster to join. None: the cluster that this process is connected to, else a local
            cluster that the pool starts.
        spread: place the actors on all nodes of the cluster in turn, instead of on the node of this process.
        transport: "tcp" sends masks over authenticated TCP even on this node. "auto" does so only where an actor
            cannot map the engine's shared memory.
        slots: sequences that can be open on one actor at the same time. Memory is only taken for those that are.
        mask_limit: seconds that one mask may take. The actor is killed after that, and the sequence fails with
            `MaskTimeout`. The actor's other sequences are opened on another actor.
        max_replays: what the death of an actor costs. 0: every sequence with a matcher on the actor fails with
            `WorkerDied`. More: the sequences are opened on another actor from their output tokens, and the sequence
            that the actor was filling is tried again up to `max_replays` times, alone on an actor.
        pool_wait: seconds that constraints and sequences wait while no actor is up, before they fail with
            `PoolUnavailable`.
        actor_memory_bytes: resident memory of one actor. An actor over the limit is killed, and the sequence that it
            was filling fails. An actor that has grown half way to the limit is replaced once it can be emptied.
            None: 2 GiB or half of the machine's memory, whichever is less.
        forced_tokens: workers look ahead where a mask allows only one token (`StepMasks.forced`). For engines that call
            `LogitPostProcessor.sampled`; the engine of this project sets it (`EngineConfig.forced_tokens`).
        max_cache_bytes: memory for compiled grammars that no request uses.
        max_compiling: distinct constraints that are being compiled or wait for it. More are rejected with
            `CompileQueueFull`.
        compile_limits: what one compilation may take.

    Raises:
        ValueError: a value is out of range.
    """

    num_actors: int | None = None
    address: str | None = None
    spread: bool = False
    transport: Literal["auto", "tcp"] = "auto"
    slots: int = 4096
    mask_limit: float = 5.0
    max_replays: int = 0
    pool_wait: float = 30.0
    actor_memory_bytes: int | None = None
    forced_tokens: bool = False
    max_cache_bytes: int = DEFAULT_CACHE_BYTES
    max_compiling: int = 256
    compile_limits: CompileLimits = field(default_factory=CompileLimits)

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(("num_actors", "slots", "max_compiling"), Range(1)),
        **dict.fromkeys(("max_replays", "pool_wait", "max_cache_bytes"), Range(0)),
        "mask_limit": Range(0, exclusive=True),
        "actor_memory_bytes": Range(256 << 20),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
