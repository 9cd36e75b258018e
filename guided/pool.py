"""MaskPool: where mask workers live. `InlinePool` (here) keeps one in the caller; `actors.RayPool` many, elsewhere.

A pool compiles, places sequences, carries the step's messages and says what became of every row. It knows nothing of
requests, batches or logits: that is `LogitPostProcessor`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary

__all__ = [
    "BackendStatus",
    "Fill",
    "Grammar",
    "MaskPool",
    "PoolStatus",
    "ReadyRows",
    "Row",
    "StepMasks",
    "WorkerStatus",
]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, ready to be opened in this pool."""

    key: str
    """`backend:constraint key`: equal for equal constraints on the same backend."""
    backend: str
    constraint: Constraint
    cache_key: tuple[str, ...]
    """Under which the pool's cache counts its users (`guided.grammar_cache`)."""
    compile_seconds: float = 0.0
    """Seconds the compilation took."""


class Fill(msgspec.Struct, gc=False):
    """One row to be filled: the mask after `start + len(tokens)` output tokens of an open sequence."""

    sequence_id: int
    start: int
    tokens: Sequence[int]


class Row(msgspec.Struct, gc=False):
    """What became of a `Fill`."""

    state: Literal["ready", "needs_history", "failed", "late", "unplaced"]
    """`needs_history`: its worker lacks tokens: send all of them. `unplaced`: no worker has it, or the one that had is
    gone: send all of them when there is a place for it (`MaskPool.settled`); its time counts from then."""
    seconds: float = 0.0
    """Accept and fill in the worker, seconds."""
    error: GuidedError | None = None
    mask: NDArray[np.int32] | None = None
    """int32 `[words]`, where it is ready and was not copied: read it, and not after the next `submit`."""


class ReadyRows(NamedTuple):
    """Masks of one step that lie in one place."""

    masks: NDArray[np.int32]
    """`[n, words]`: where a worker wrote them. To be read, and not after the next `submit`."""
    rows: NDArray[np.intp]
    """`[ready]`: which rows of `masks` count."""
    indices: NDArray[np.intp]
    """`[ready]`: which fills they are for."""


@dataclass(slots=True)
class StepMasks(Sequence[Row]):
    """What became of a step, in columns: nearly every fill is `ready`, and none of those is touched one by one.

    As a sequence it has a `Row` for each fill.
    """

    size: int
    """Fills."""
    ready: list[ReadyRows]
    other: dict[int, Row] = field(default_factory=dict)
    """Of each fill that isn't ready, by its place in the step."""
    seconds: float = 0.0
    """Accept and fill in the workers, summed."""
    copied: bool = False
    """The masks are in the caller's bitmask too."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        index %= self.size
        if index in self.other:
            return self.other[index]
        for part in self.ready:
            for place in np.flatnonzero(part.indices == index).tolist():
                return Row("ready", mask=None if self.copied else part.masks[part.rows[place]])
        raise KeyError(index)

    def copy_to(self, bitmask: NDArray[np.int32]) -> None:
        """Copy what is ready: fill i's mask to row i of `bitmask`, int32 `[>= len(self), words]`."""
        for part in self.ready:
            bitmask[part.indices] = part.masks[part.rows]
        self.copied = True

    def keep(self) -> None:
        """Copy what is ready to memory of its own, which no later `submit` changes."""
        self.ready = [ReadyRows(part.masks[part.rows], np.arange(len(part.rows)), part.indices) for part in self.ready]

    def update(self, later: StepMasks, indices: Sequence[int]) -> None:
        """Take over what became of some fills that were submitted once more.

        Args:
            later: in which fill i is fill `indices[i]` of this step.
        """
        places = np.asarray(indices, np.intp)
        for index in indices:
            self.other.pop(index, None)
        self.ready += [ReadyRows(part.masks, part.rows, places[part.indices]) for part in later.ready]
        self.other.update((indices[index], row) for index, row in later.other.items())
        self.seconds += later.seconds

    def override(self, index: int, row: Row) -> None:
        """Have fill `index` be what `row` says, which is not ready."""
        self.other[index] = row
        self.ready = [
            ReadyRows(part.masks, part.rows[part.indices != index], part.indices[part.indices != index])
            for part in self.ready
        ]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, for `/health`."""

    index: int
    incarnation: int
    state: Literal["starting", "up", "restarting", "down"]
    pid: int | None
    node: str | None
    open_sequences: int
    restarts: int
    ends: Mapping[str, int] = field(default_factory=dict)
    """How many incarnations ended, or didn't start, by cause."""
    last_end: str | None = None
    """What became of the last one that ended."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One grammar library as a compiler, for `/health` and the metrics. Counts are since the start."""

    name: str
    state: Literal["up", "suspended"] = "up"
    """`suspended`: it crashed too often, and is left alone for a while."""
    crashes: int = 0
    """Processes that ended while they compiled with it."""
    timeouts: int = 0
    suspensions: int = 0
    seconds_left: float = 0.0
    """Until it is tried again."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool, for `/health` and the metrics."""

    name: str
    workers: list[WorkerStatus] = field(default_factory=list)
    compiling: int = 0
    """Constraints that are being compiled or wait for it."""
    backends: list[BackendStatus] = field(default_factory=list)
    trouble: str | None = None
    """What keeps workers that end from being replaced, where something does."""

    @property
    def healthy(self) -> bool:
        """At least one worker is up."""
        return any(worker.state == "up" for worker in self.workers)


class MaskPool(Protocol):
    """Workers, and the way to them. All methods but `status` are called from one thread, the engine's."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What the masks are over."""

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """Compile by the first of `backends` that can enforce all of `constraint`, and make it available to workers.

        The future ends with `InvalidConstraint`, `UnsupportedConstraint` (the last backend's, where none can),
        `CompileTimeout`, `CompileQueueFull`, `PoolUnavailable` or `BackendError`. Equal constraints share one
        compilation.
        """

    def release(self, grammar: Grammar) -> None:
        """One request less uses `grammar` (each `compile` counts one): at none, it may be evicted."""

    def open(self, sequence_id: int, grammar: Grammar, parent_id: int | None = None) -> None:
        """Place a new sequence: on the least loaded worker, or on `parent_id`'s. It stays there (sticky).

        Where no worker is up it waits for one, for a while: its rows are `unplaced`, and then fail, `PoolUnavailable`.

        Raises:
            PoolUnavailable: the pool is shut down.
        """

    def free(self, sequence_ids: Collection[int]) -> None:
        """Close matchers. Unknown ids are ignored."""

    def submit(self, fills: Sequence[Fill]) -> None:
        """Send one step's work; returns in microseconds. One `collect` follows before the next `submit`."""

    def collect(self, bitmask: NDArray[np.int32] | None, timeout: float, patience: float | None = None) -> StepMasks:
        """Wait for the step's rows, `timeout` seconds at the most.

        Args:
            bitmask: int32 `[>= len(fills), words]`; row i receives fill i's mask where its state is `ready`, and is
                untouched otherwise. None: nothing is copied; the masks are where the workers wrote them.
            patience: seconds, less than `timeout`: once they are over it is enough that one row is decided. None: as
                long as `timeout`.

        Returns:
            One row a fill, in order. `late`: not decided in time; its place is not reused before the worker answered.
        """

    def settled(self, sequence_ids: Collection[int], timeout: float) -> list[int]:
        """Which of these sequences, whose last fill was `late`, to ask again: nothing of theirs is under way any more.

        The mask is there, or it failed, or it has to be sent anew, and there is a worker for it. Waits for the first,
        `timeout` seconds at the most.
        Between a `collect` and the next `submit`.
        """

    def failures(self) -> dict[int, GuidedError]:
        """Open sequences that were lost since the last call (their worker died), each reported once."""

    def status(self) -> PoolStatus:
        """A snapshot; from any thread."""

    def shutdown(self) -> None:
        """Stop the workers and give everything back. Idempotent."""
