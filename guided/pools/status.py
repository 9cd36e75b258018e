"""PoolStatus: the state of a pool, its workers and its compilers, for `/health` and the
metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WorkerState = Literal["starting", "up", "restarting", "down"]
"""The state of a worker. `down`: it did not start at the last attempt."""
EndCause = Literal[
    "died", "memory", "import", "load", "fill", "frozen", "transfer", "not_started"
]
"""Why an incarnation of a worker ended: by itself; killed because of its memory,
because it took too long to import a library, to load a grammar or to fill a mask,
because it did not run any more, or because it did not take what it was sent; or it
never came up."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of one worker, for `/health`."""

    index: int
    incarnation: int
    state: WorkerState
    pid: int | None
    node: str | None
    open_sequences: int
    restarts: int
    node_id: str | None = None
    """The id of the node in Ray."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Number of incarnations that ended or did not start, by cause."""
    last_end: str | None = None
    """The message about the end of the last incarnation."""
    silent: float = 0.0
    """Seconds since the last heartbeat."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The status of one grammar library as a compiler, for `/health` and the metrics.
    Counts are since the start."""

    name: str
    crashes: int = 0
    """Number of processes that ended while they compiled with this library."""
    timeouts: int = 0
    """Number of compilations that exceeded their time limit."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The status of the pool, for `/health` and the metrics."""

    name: str
    workers: list[WorkerStatus] = field(default_factory=list)
    compiling: int = 0
    """Number of constraints that are being compiled or queued."""
    backends: list[BackendStatus] = field(default_factory=list)
    trouble: str | None = None
    """The reason why the pool can't replace workers that end. None: it can."""
    cache_hits: int = 0
    """Number of constraints that were in the cache of grammars."""
    shared_compilations: int = 0
    """Number of constraints that waited for the compilation of an equal one."""
    fork_server_ends: int = 0
    """Number of fork servers of the compile processes that were lost and replaced."""
    replays: int = 0
    """Number of sequences that were opened on another worker after the end of theirs,
    since the start."""

    quarantined: list[str] = field(default_factory=list)
    """Hashes of the constraints that are refused, because they have ended several
    workers."""
    quarantines: int = 0
    """Number of constraints that were put into quarantine, since the start."""

    @property
    def degraded(self) -> str | None:
        """The reason why the pool does not work completely. None: it does."""
        for worker in self.workers:
            if worker.state != "up":
                return f"mask actor {worker.index} is {worker.state}"
            if worker.silent > 1:
                return f"mask actor {worker.index} has had no heartbeat for {worker.silent:.0f} s"
        return None

    @property
    def healthy(self) -> bool:
        """Whether at least one worker is up, or none has been started: the first
        constraint starts them."""
        if not self.workers:
            return self.trouble is None
        return any(worker.state == "up" for worker in self.workers)
