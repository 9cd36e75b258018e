"""LogitPostProcessor: what an engine calls around each forward pass to change a batch's
logits (vLLM's RFC 5423).

    processor.prepare(sequences)       # before the forward pass: start what takes long, elsewhere
    logits = model(...)                # meanwhile
    report = processor.apply(logits)   # change the logits, in place

`GuidedProcessor` is the standard implementation. `PostProcessors` combines it with an
application's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.protocol import Grammar
from guided.sequence import GuidedSequence, SequenceOutput, VetoReport

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    LogitsRows: TypeAlias = NDArray[np.intp] | Sequence[int] | None
    """The logits row of each sequence, all different. None: row i for sequence i."""


@dataclass(slots=True)
class ApplyReport:
    """The result of `apply`: sequences without a mask, and durations."""

    failed: dict[int, GuidedError] = field(default_factory=dict)
    """The errors of sequences that are over, because they have no valid mask, by id.
    Their logits rows allow a stop token only."""
    late: list[int] = field(default_factory=list)
    """Ids of sequences without a mask at the deadline. They must not be sampled in this
    step: compute their last token again once `decided` returns them."""
    vetoes: dict[int, VetoReport] = field(default_factory=dict)
    """The sequences that lose tokens, by id. They must not be sampled in this step."""
    wait_seconds: float = 0.0
    """Seconds that `apply` waited for masks. Together with `prepare`, the exposed mask
    time."""
    mask_seconds: float = 0.0
    """Seconds that the workers have spent on masks since the last step, summed."""
    kernel_seconds: float = 0.0
    """Seconds for writing -inf, which is device work. On CUDA: for launching it."""

    def add(self, other: ApplyReport) -> None:
        """Add the report of another post-processor about the same step."""
        self.failed |= other.failed
        self.vetoes |= other.vetoes
        self.late = sorted({*self.late, *other.late} - self.failed.keys())
        self.wait_seconds += other.wait_seconds
        self.mask_seconds += other.mask_seconds
        self.kernel_seconds += other.kernel_seconds


@dataclass(frozen=True, slots=True)
class SampledEdit:
    """A change to a sequence after a token was sampled. The engine applies the fields
    in this order."""

    rollback: int = 0
    """Number of output tokens to remove, including the sampled one."""
    append: Sequence[int] = ()
    """Tokens to append without sampling. The engine may leave out any number of them at
    the end."""
    stop: bool = False
    """Whether to end the sequence (`finish_reason` stop)."""


class LogitPostProcessor:
    """The methods of a post-processor that an engine calls, all from one thread. Each
    has a default: override some.

    `RFC5423Adapter` (`rfc_5423.py`) runs a class with the RFC's own signatures.
    """

    all_rows: bool = True
    """Whether to handle all sequences of the batch, in the order of the rows. False:
    only those with a constraint."""
    needs_samples: bool = False
    """Whether `edits` gets the sampled tokens. The engine then computes
    log-probabilities for each token."""
    max_rollback: int = 0
    """Maximum of `SampledEdit.rollback`. Until a sequence has ended, the engine does
    not send its last `max_rollback - 1` output tokens to the client."""

    @property
    def name(self) -> str:
        """The name in errors and logs."""
        return type(self).__name__

    def initialize(
        self, request_id: str, constraint: Constraint, backend: str = "auto"
    ) -> Future[Grammar] | None:
        """Start a request with a constraint. Its sequences can be prepared once the
        future is done.

        Args:
            backend: "auto", or the name of one backend.

        Returns:
            A future that ends with the compiled grammar, or with the error that fails
                the request. None: nothing is
            compiled.

        Raises:
            UnsupportedConstraint: the named backend does not have this kind of
                constraint.
            InvalidRequest: there is no backend of that name.
        """
        return None

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: LogitsRows = None,
        batch: int | None = None,
    ) -> None:
        """Start one step; return in microseconds. `apply` follows, or another `prepare`
        if the step is given up.

        Args:
            sequences: the sequences of the batch, each at most once.
            logits_rows: the logits row of each sequence, all different. None: row i for
                sequence i.
            batch: the number of the batch. The same number again, which is the fastest,
                means that no row has changed, failed or been freed since then. None:
                they may have.

        Raises:
            ValueError: a sequence's request is not initialized, its grammar is still
                being compiled, or its id is used twice. Nothing was sent.
            GuidedError: the compilation of its grammar failed.
        """

    def apply(
        self, logits: torch.Tensor, deadline: float | None = None
    ) -> ApplyReport | None:
        """Mask the prepared rows, in place. A row without a valid mask is reported, and
        allows a stop token only.

        Args:
            logits: float `[rows, >= padded_vocab_size]` on any device; only prepared
                rows are written.
            deadline: seconds to wait for masks, from the time that the logits are
                computed. A row without its mask by then is late. If every row of the
                logits was prepared and all are late, the wait goes on until the first
                mask is there, for at most 0.1 s. None: see `MaskPool.collect`.

        Returns:
            A report. None: every row is ready.

        Raises:
            RuntimeError: `prepare` was not called.
            ValueError: the logits are narrower than the vocabulary.
        """

    def edits(
        self,
        sequences: Sequence[GuidedSequence],
        samples: Sequence[SequenceOutput | None] = (),
    ) -> Mapping[int, SampledEdit | Exception]:
        """Return how outputs are to change, by sequence id. Called after each step,
        between `apply` and `prepare`.

        Args:
            sequences: those that were passed to `prepare`. The outputs include the
                sampled tokens. Edits of ended sequences are ignored, and those of rows
                without a sampled token (late, failed, or of a draft).
            samples: the sampled token of each sequence, or None. Empty unless
                `needs_samples`.

        Returns:
            Edits. An exception in place of an edit ends the sequence's request.
        """
        return {}

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        """Return those of these late sequences that are decided: they have a mask, or
        failed. Does not wait."""
        return list(sequence_ids)

    def rollback(self, sequence_id: int, length: int) -> None:
        """See `MaskPool.rollback`."""

    def free_sequence(self, sequence_id: int) -> None:
        """End one sequence of a request; the others continue. Idempotent."""

    def free(self, request_id: str) -> None:
        """End a request, for whatever reason: close its matchers. Idempotent."""
