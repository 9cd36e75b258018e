"""RayPoolOptions: every option of the Ray pool, with its default value.

`actors.RayPool`, `LLM`, `guided serve` and the Ray Serve application all take their
pool options from this class.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from guided.errors import bounded
from guided.limits import CompileLimits, Range, check_ranges
from guided.masks.resources import available_cpus
from guided.pools.grammar_cache import DEFAULT_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Nodes of a Ray cluster on which actors may run."""

    text: str
    """As the user wrote it."""
    kind: Literal["local", "spread", "resource", "label", "group"]
    name: str = ""
    """Name of the resource or the label."""
    value: str = ""
    """Value of the label, or id of the placement group."""
    amount: float = 0.0
    """Amount of the resource that each actor takes."""

    @classmethod
    def parse(cls, text: str) -> NodePlacement:
        """Read `local`, `spread`, `RESOURCE`, `RESOURCE:AMOUNT`, `LABEL=VALUE` or
        `group:ID`.

        Raises:
            ValueError: it is none of these.
        """
        if text == "local":
            return LOCAL
        if text == "spread":
            return cls(text, "spread")
        if _GROUP.fullmatch(text):
            return cls(text, "group", value=text.removeprefix("group:"))
        name, is_label, value = text.partition("=")
        if is_label and name and value:
            return cls(text, "label", name, value)
        name, _, amount = text.partition(":")
        with contextlib.suppress(ValueError):
            if name and not is_label and 0 < (number := float(amount or 1)) < math.inf:
                return cls(text, "resource", name, amount=number)
        raise ValueError(
            f"placement is {bounded(text)!r}; it must be local, spread, a resource of Ray (NAME or NAME:AMOUNT) or a "
            "label of Ray's nodes (NAME=VALUE)"
        )


_GROUP = re.compile("group:[0-9a-f]{36}")
LOCAL = NodePlacement("local", "local")


@dataclass(frozen=True)
class RayPoolOptions:
    """How many mask actors a pool has, where they run and what each of them may take.

    Args:
        num_actors: number of mask actors. None: one for every four CPUs, at least 2, at
            most 8.
        address: address of a Ray cluster to join. None: the cluster that this process
            is connected to, else a local cluster that the pool starts.
        placement: nodes of the cluster that the actors run on. "local": the node of
            this process. "spread": all nodes in turn. "NAME:AMOUNT": nodes with the Ray
            resource NAME, of which each mask actor takes AMOUNT (1 if left out).
            "NAME=VALUE": nodes with this label. "group:ID": the placement group with
            this id, as the Ray Serve application makes it (`deploy.arguments.bundles`).
        actor_cpus: CPUs that Ray reserves for each mask actor. None: 1; 0 in a local
            cluster that the pool starts.
        slots: maximum number of sequences that are open on one actor at the same time.
            Unused slots take no memory.
        mask_limit: seconds that one mask may take. The actor is killed after that, and
            the sequence fails with `MaskTimeout`. The actor's other sequences are
            opened on another actor.
        max_replays: what happens to the sequences of an actor that died. 0: every
            sequence with a matcher on it fails with `WorkerDied`. n: the sequences are
            opened on another actor from their output tokens, and one that was being
            filled at the death of n + 1 actors fails.
        pool_wait: seconds that constraints and sequences wait while no actor is up,
            before they fail with `PoolUnavailable`.
        actor_memory_bytes: resident memory of one actor. An actor over the limit is
            killed, and the sequence that it was filling fails. None: 2 GiB or half of
            the machine's memory, whichever is less.
        preload: grammar libraries that an actor imports before it is up. Importing
            another one, when a constraint first needs it, takes seconds.
        forced_tokens: workers look ahead where a mask allows only one token
            (`StepMasks.forced`). For engines that call `LogitPostProcessor.sampled`;
            the engine of this project sets it.
        max_cache_bytes: size of the cache of compiled grammars in each process. The
            least recently used ones leave it. Those that sequences use stay in memory
            until then.
        compile_limits: limits on the resources of one compilation.

    Raises:
        ValueError: a value is out of range.
    """

    num_actors: int | None = None
    address: str | None = None
    placement: str = "local"
    actor_cpus: float | None = None
    slots: int = 4096
    mask_limit: float = 5.0
    max_replays: int = 0
    pool_wait: float = 30.0
    actor_memory_bytes: int | None = None
    preload: tuple[str, ...] = ("llguidance", "xgrammar")
    forced_tokens: bool = False
    max_cache_bytes: int = DEFAULT_CACHE_BYTES
    compile_limits: CompileLimits = field(default_factory=CompileLimits)

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(("num_actors", "slots"), Range(1)),
        **dict.fromkeys(
            ("max_replays", "pool_wait", "max_cache_bytes", "actor_cpus"), Range(0)
        ),
        "mask_limit": Range(0.001),
        "actor_memory_bytes": Range(256 << 20),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        NodePlacement.parse(self.placement)

    @property
    def actors(self) -> int:
        """`num_actors`, or its default value."""
        return self.num_actors or max(2, min(8, available_cpus() // 4))
