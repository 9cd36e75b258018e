"""LogitPostProcessor: what an engine calls around each forward pass to change a batch's logits (vLLM's RFC 5423).

    processor.prepare(sequences)       # before the forward pass: start what takes long, elsewhere
    logits = model(...)                # meanwhile
    report = processor.apply(logits)   # change the logits, in place

`GuidedProcessor` (`standard.py`) is the standard implementation. `ProcessorBundle` (`bundle.py`) combines it with an
application's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.protocol import Grammar
from guided.sequence import GuidedSequence, VetoReport

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(slots=True)
class ApplyReport:
    """The result of `apply`: rows without a mask, and durations."""

    failed: dict[int, GuidedError] = field(default_factory=dict)
    """Errors by sequence id. The sequence has no valid mask and is over: its logits row allows a stop token only."""
    late: list[int] = field(default_factory=list)
    """Ids of sequences without a mask at the deadline. They must not be sampled in this step: compute their last token
    again once `decided` returns them."""
    vetoes: dict[int, VetoReport] = field(default_factory=dict)
    """By id: sequences of which tokens are taken back. They must not be sampled in this step."""
    wait_seconds: float = 0.0
    """Seconds that `apply` waited for masks. Together with `prepare`, the exposed mask time."""
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
    """A change to a sequence after a token was sampled. The engine applies the fields in this order."""

    rollback: int = 0
    """Number of output tokens to remove, including the sampled one."""
    append: Sequence[int] = ()
    """Tokens to append without sampling. The engine may leave out any number of them at the end."""
    stop: bool = False
    """End the sequence (`finish_reason` stop)."""


class LogitPostProcessor:
    """The methods of a post-processor that an engine calls, all from one thread. Each has a default: override some.

    `ProcessorBundle`, and with it the engine, also takes the RFC's own signatures: `initialize(config)`, called once
    when the engine is made, `prepare(sequences)`, and `apply(logits)` that returns the logits.
    """

    all_rows: bool = True
    """Handle all sequences of the batch, in the order of the rows. False: only those with a constraint."""
    max_rollback: int = 0
    """Maximum of `SampledEdit.rollback`. Until a sequence has ended, the engine does not send its last
    `max_rollback - 1` output tokens to the client."""

    def initialize(self, request_id: str, constraint: Constraint, backend: str = "auto") -> Future[Grammar] | None:
        """Start a request with a constraint. Its sequences can be prepared once the future is done.

        Args:
            backend: "auto", or the name of one backend.

        Returns:
            A future that ends with the compiled grammar, or with the error that fails the request. None: nothing is
            compiled.

        Raises:
            UnsupportedConstraint: the named backend does not have this kind of constraint.
            InvalidRequest: there is no backend of that name.
        """
        return None

    def prepare(
        self, sequences: Sequence[GuidedSequence], logits_rows: NDArray[np.intp] | Sequence[int] | None = None
    ) -> None:
        """Start one step; return in microseconds. `apply` follows.

        Args:
            sequences: the sequences of the batch, each at most once. While the batch does not change, pass the same
                tuple object again: this is the fastest.
            logits_rows: the logits row of each sequence, all different. None: row i for sequence i.

        Raises:
            ValueError: a sequence's request is not initialized, its grammar is still being compiled, or its id is used
                twice. Nothing was sent.
            GuidedError: the compilation of its grammar failed.
            RuntimeError: `apply` has not followed the last `prepare`.
        """

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> ApplyReport | torch.Tensor | None:
        """Mask the prepared rows, in place. A row without a valid mask is reported, and allows a stop token only.

        Args:
            logits: float `[rows, >= padded_vocab_size]` on any device; only prepared rows are written.
            deadline: seconds to wait for masks, from the time that the logits are computed. A row without its mask by
                then is late. If every row of the logits was prepared and all are late, the wait goes on until the first
                mask is there, for at most 0.1 s. None: see `MaskPool.collect`.

        Returns:
            A report. Or the changed logits, as in the RFC. None: every row is ready.

        Raises:
            RuntimeError: `prepare` was not called.
            ValueError: the logits are narrower than the vocabulary.
        """

    def sampled(
        self, seq: GuidedSequence, token_id: int, logprobs: Mapping[int, Any]
    ) -> tuple[int, Sequence[int], bool]:
        """Decide what follows a sampled token. Called once per sequence and step, if it is overridden.

        Args:
            seq: the sequence. Its output already ends with the token.
            logprobs: of the token, and of as many others as the request asked for, by token id.

        Returns:
            The number of tokens to remove before the sampled one (less than `max_rollback`), the tokens to append
            instead of it, and whether to end the sequence. An exception ends the sequence's request.
        """
        return 0, [token_id], False

    @property
    def needs_samples(self) -> bool:
        """Whether `sampled` is overridden: the engine then computes log-probabilities for each token."""
        return type(self).sampled is not LogitPostProcessor.sampled

    def edits(self, sequences: Sequence[GuidedSequence]) -> dict[int, SampledEdit]:
        """Return how outputs are to change, by sequence id. Called after each step, between `apply` and `prepare`.

        Args:
            sequences: the object that was passed to `prepare`. The outputs include the sampled tokens. Edits of rows
                without one (late, failed, or of a draft) and of ended sequences are ignored.
        """
        return {}

    def decided(self, sequence_ids: Collection[int]) -> list[int]:
        """Return those of these late sequences that are decided: they have a mask, or failed. Does not wait."""
        return list(sequence_ids)

    def rollback(self, sequence_id: int, length: int) -> None:
        """See `MaskPool.rollback`."""

    def free_sequence(self, sequence_id: int) -> None:
        """End one sequence of a request; the others continue. Idempotent."""

    def free(self, request_id: str) -> None:
        """End a request, for whatever reason: close its matchers. Idempotent."""
