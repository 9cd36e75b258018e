"""MaskPool: the interface between the post-processor and the workers that compute
masks.

A pool compiles constraints, keeps one matcher per open sequence, and returns the mask
or the error of each row of a step. It knows nothing of requests, batches or logits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.status import PoolStatus
from guided.sequence import GuidedSequence, VetoReport
from guided.vocabulary import Vocabulary

CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")
"""The client of the request that is being handled. Clients take turns where constraints
wait to be compiled."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, ready to be opened in this pool."""

    key: str
    """A key that is equal for equal constraints that were compiled with the same choice
    of backends."""
    backend: str
    constraint: Constraint
    compile_seconds: float = 0.0
    """Seconds that the compilation took."""
    compiled_at: float = field(default_factory=time.monotonic, compare=False)
    """The `time.monotonic()` at the end of the compilation."""
    checked: tuple[str, ...] = ()
    """JSON pointers of keywords that are checked when the output ends, not enforced by
    the mask."""
    nbytes: int = field(default=0, compare=False)
    """The size in memory, as measured when the grammar was compiled."""
    dumped: Any = field(default=None, repr=False, compare=False)
    """Serialized grammar, from which workers in other processes load it."""
    compiled: CompiledGrammar | None = field(default=None, repr=False, compare=False)
    """The grammar itself, for a worker in this process."""


class ReadyMasks(NamedTuple):
    """Masks of one step that lie in one worker's table. Valid until the next `submit`;
    read-only."""

    masks: NDArray[np.int32]
    """The worker's mask column, `[slots, words]`."""
    slots: NDArray[np.intp]
    """The lines of `masks` that belong to this step, `[ready]`."""
    rows: NDArray[np.intp]
    """The positions of their sequences among the submitted ones, `[ready]`."""
    seconds: NDArray[np.float32]
    """The time that the worker took for each line of `masks`, `[slots]`."""


@dataclass(slots=True)
class StepMasks:
    """The state of a step's rows: each is ready, late or failed."""

    ready: list[ReadyMasks] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    """Rows that are not decided yet: their masks are being computed, or their sequences
    wait for a worker."""
    failed: dict[int, GuidedError] = field(default_factory=dict)
    """The errors of rows of which the sequence is over, by row."""
    seconds: float = 0.0
    """Seconds that the workers have spent on masks since the last step, summed."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """Runs of forced tokens, by row: the only allowed token, and the tokens after it
    that have no alternative either. A run has at least two tokens. Empty unless the
    pool looks ahead (`forced_tokens`)."""
    vetoes: dict[int, VetoReport] = field(default_factory=dict)
    """Rows that lose tokens, of sequences with `final`. The mask is the one after fewer
    tokens. Declare the shorter output with `rollback`, and submit the sequence again:
    the mask will forbid the token that was taken back."""

    def note(self, row: int, sequence: GuidedSequence, report: VetoReport) -> None:
        """Record a worker's report about a row with a mask."""
        sequence.final = report.final
        if report.length < len(sequence.output_token_ids):
            self.vetoes[row] = report


MAX_FORCED_TOKENS = 8
"""Maximum number of forced tokens that are reported at once."""


def forced_runs(
    runs: NDArray[np.int32], rows: NDArray[np.intp]
) -> dict[int, list[int]]:
    """Return the runs of at least two tokens by row.

    Args:
        runs: int32 `[rows, MAX_FORCED_TOKENS]`, with -1 behind the last token.
    """
    forced: dict[int, list[int]] = {}
    for index in np.flatnonzero(runs[:, 1] >= 0).tolist():
        run = runs[index]
        forced[int(rows[index])] = run[run >= 0].tolist()
    return forced


class MaskPool(Protocol):
    """Workers that compute masks. All methods but `status` are called from one thread,
    the engine's."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def compile(
        self, constraint: Constraint, backends: Sequence[str]
    ) -> Future[Grammar]:
        """Compile with the first of `backends` that can enforce all of `constraint`.
        Equal ones share one compilation.

        The future may end with `InvalidConstraint`, `CompileTimeout`,
        `CompileQueueFull`, `PoolUnavailable` or `BackendError`.
        """

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None:
        """Add a sequence. Its matcher is opened on a worker when the sequence is first
        submitted.

        The matcher stays on that worker, and starts from `sequence.output_token_ids`,
        which may have tokens already. If the worker ends, the pool opens the sequence
        on another one, or fails it.
        """

    def free(self, sequence_ids: Collection[int]) -> None:
        """Close matchers. Unknown ids are ignored."""

    def rollback(self, sequence_id: int, length: int) -> None:
        """Declare that submitted tokens after the first `length` output tokens have
        changed (a rejected draft).

        Not needed for an output that is only shorter. Unknown ids are ignored.
        """

    def submit(
        self, sequences: Sequence[GuidedSequence], batch: int | None = None
    ) -> None:
        """Send one step's new tokens to the workers; return in microseconds. `collect`
        follows.

        Args:
            sequences: open sequences, each at most once.
            batch: the number of the batch. The same number again, which is the fastest,
                means that they are the same sequences. None: they may be others.
                Callers that share a pool use different numbers.
        """

    def collect(self, deadline: float | None = None) -> StepMasks:
        """Wait for the step's masks. While some are late, it may be called again.

        Args:
            deadline: seconds to wait at most. Rows that are not decided by then are
                late. None: a row is late only if no worker can take its sequence, or
                took it too recently for the time limit of its mask to be over.
        """

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        """Return those of these late sequences that are decided: their mask is ready,
        or they failed. Does not wait.

        Called between `collect` and `submit`. A sequence that is not open is decided.
        """

    def status(self) -> PoolStatus:
        """Return a snapshot; from any thread."""

    def shutdown(self) -> None:
        """Stop the workers and release all resources. Idempotent."""
