"""LogitPostProcessor, what an engine calls: `initialize` per request, `prepare` and `apply` per step, then `free`.

    processor.prepare(rows)        # before the forward pass: tokens go out, masks are computed elsewhere
    logits = model(...)            # meanwhile
    report = processor.apply(logits)   # wait for what is missing, write -inf over the forbidden logits

The shape is vLLM's RFC 5423. It sees a small dataclass for a row, never the engine's own structures.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from guided.backends import candidates
from guided.constraint import Constraint
from guided.errors import BackendError, GuidedError, MaskTimeout
from guided.kernel import apply_bitmask, load_loose_kernel
from guided.pool import Fill, Grammar, MaskPool, Row, StepMasks
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["ApplyReport", "GuidedRow", "LogitPostProcessor"]

_PATIENCE_WITH_POOL = 1.5
_ALONE_SECONDS = 0.1
"""How long a step waits for its first mask where nobody could go on: new requests wait as long."""


class GuidedRow(msgspec.Struct, gc=False):
    """One constrained row of a step's batch."""

    request_id: str
    sequence_id: int
    """Unique within the engine's life: it names the matcher."""
    token_ids: Sequence[int]
    """All output tokens so far, by reference: read in `prepare`, not kept."""
    logits_row: int
    """Which row of the logits is this sequence's; no two rows share one."""
    parent_id: int | None = None
    """The sequence that this one was forked from, on its first step: its matcher is copied where it still is there."""


@dataclass(slots=True)
class ApplyReport:
    """What `apply` did besides masking."""

    failed: dict[int, GuidedError] = field(default_factory=dict)
    """By sequence id: no valid mask exists; its logits row is untouched and must not be sampled."""
    late: list[int] = field(default_factory=list)
    """Sequence ids whose mask is still being computed, or that wait for a worker; must not be sampled in this step."""
    wait_seconds: float = 0.0
    """How long `apply` blocked for masks: together with `prepare`, the exposed mask time."""
    mask_seconds: float = 0.0
    """What the workers spent on this step's rows, summed."""
    kernel_seconds: float = 0.0
    """Writing -inf: device work."""


@dataclass(slots=True)
class _Request:
    future: Future[Grammar]
    sequences: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Sequence:
    request_id: str
    sent: int = 0
    """Output tokens the worker was told of."""


class LogitPostProcessor:
    """Masks the constrained rows of a batch, step after step. Used from one thread.

    Args:
        pool: where masks are computed; handed in, and not shut down here.
        fill_limit: seconds that a mask may take, parked or waited for, before its sequence fails with `MaskTimeout`.
            The pool sees to that, and knows whose mask it is that takes so long; here a sequence is failed after half
            as long again, whatever the pool thinks.
    """

    def __init__(self, pool: MaskPool, fill_limit: float = 5.0) -> None:
        self._pool = pool
        self._fill_limit = _PATIENCE_WITH_POOL * fill_limit
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._rows: Sequence[GuidedRow] = ()
        self._fills: list[Fill] = []
        self._unplaced: dict[int, GuidedError] = {}
        self._prepared = False
        self._leaving: list[Future[Grammar]] = []
        self._asked = 0.0
        self._late: dict[int, float] = {}
        """Sequences whose mask was late and is still to come: `time.monotonic()` of when it was first asked for."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What the masks are over."""
        return self._pool.vocabulary

    def initialize(self, request_id: str, constraint: Constraint, backend: str = "auto") -> Future[Grammar]:
        """Have `constraint` compiled for a request. The request can be prepared once the future is done.

        Args:
            backend: "auto", or the name of one backend.

        Returns:
            A future of the compiled grammar; it ends with `InvalidConstraint`, `UnsupportedConstraint`,
            `CompileTimeout`, `PoolUnavailable` or `BackendError`.

        Raises:
            UnsupportedConstraint: the named backend doesn't have this kind of constraint.
            InvalidRequest: there is no backend of that name.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already initialized")
        load_loose_kernel()
        future = self._pool.compile(constraint, candidates(constraint.kind, backend))
        self._requests[request_id] = _Request(future)
        return future

    def prepare(self, rows: Sequence[GuidedRow]) -> None:
        """Send one step's rows to the workers; returns in microseconds. `apply` follows.

        Raises:
            ValueError: a row's request is not initialized (or is freed), or its grammar is still being compiled.
                Nothing was sent.
            RuntimeError: `apply` has not followed the last one.
        """
        if self._prepared:
            raise RuntimeError("prepare() was called twice without apply() between")
        self._unplaced = {}
        known = self._sequences
        try:
            sequences = [known[row.sequence_id] for row in rows]
        except KeyError:
            rows = self._open_new(rows)
            sequences = [known[row.sequence_id] for row in rows]
        self._prepared = True
        self._asked = time.monotonic()
        fills: list[Fill] = []
        add = fills.append
        for row, sequence in zip(rows, sequences, strict=True):
            token_ids = row.token_ids
            end, start = len(token_ids), sequence.sent
            if start > end:
                start = end
            add(Fill(row.sequence_id, start, token_ids[start:]))
            sequence.sent = end
        self._rows, self._fills = rows, fills
        if fills:
            self._pool.submit(fills)

    def _open_new(self, rows: Sequence[GuidedRow]) -> list[GuidedRow]:
        """Open matchers for those that have none; returns the rows that have one now."""
        known = self._sequences
        self._check_new(row for row in rows if row.sequence_id not in known)
        return [row for row in rows if row.sequence_id in known or self._open(row)]

    def _check_new(self, rows: Iterable[GuidedRow]) -> None:
        for row in rows:
            request = self._requests.get(row.request_id)
            if request is None:
                raise ValueError(f"request {row.request_id!r} is not initialized")
            if not request.future.done():
                raise ValueError(f"the grammar of request {row.request_id!r} is still being compiled")

    def _open(self, row: GuidedRow) -> bool:
        request = self._requests[row.request_id]
        try:
            self._pool.open(row.sequence_id, request.future.result(timeout=0), row.parent_id)
        except GuidedError as error:
            self._unplaced[row.sequence_id] = error
            return False
        request.sequences.add(row.sequence_id)
        self._sequences[row.sequence_id] = _Sequence(row.request_id)
        return True

    def apply(self, logits: torch.Tensor, patience: float | None = None, alone: bool = True) -> ApplyReport:
        """Mask the prepared rows, in place.

        Args:
            logits: float `[rows, padded_vocab_size]` on any device; only prepared rows are written.
            patience: the step's mask deadline, in seconds from when the logits are there: a row that misses it is
                `late`. As long as there is nobody to go on without it (no row with a mask, and `alone`) it is waited
                for a little longer. None: every mask is waited for, and a row is late only while no worker is up.
            alone: nobody but the prepared rows could be sampled now.

        Never raises for a row: a row without a valid mask is in `failed` or `late`, and is not masked.
        """
        if not self._prepared:
            raise RuntimeError("apply() without prepare()")
        self._prepared = False
        report = ApplyReport(failed=self._unplaced)
        if not self._fills:
            return report
        if patience is not None and logits.is_cuda:
            import torch

            torch.cuda.current_stream(logits.device).synchronize()  # the deadline counts from here
        step = self._finish(report, patience, alone)
        started = time.perf_counter()
        rows = self._rows
        masks = [part.masks[row] for part in step.ready for row in part.rows.tolist()]
        indices = [rows[index].logits_row for part in step.ready for index in part.indices.tolist()]
        apply_bitmask(logits, masks, indices)
        report.kernel_seconds = time.perf_counter() - started
        self._rows, self._fills = (), []
        return report

    def collect(self, bitmask: NDArray[np.int32]) -> ApplyReport:
        """Instead of `apply`, for a host that writes -inf itself: every mask is waited for.

        Args:
            bitmask: int32 `[rows, words]`; a prepared row's mask goes to row `logits_row` of it. That of one that
                `failed`, or is `late` because no worker is up, is untouched.
        """
        if not self._prepared:
            raise RuntimeError("collect() without prepare()")
        self._prepared = False
        report = ApplyReport(failed=self._unplaced)
        if self._fills:
            rows = self._rows
            for part in self._finish(report, None, True).ready:
                for place, index in zip(part.rows.tolist(), part.indices.tolist(), strict=True):
                    bitmask[rows[index].logits_row] = part.masks[place]
            self._rows, self._fills = (), []
        return report

    def _finish(self, report: ApplyReport, patience: float | None, alone: bool) -> StepMasks:
        """Collect the step, and sort out who is not ready."""
        started = time.perf_counter()
        step = self._collect(patience, alone)
        report.wait_seconds = time.perf_counter() - started
        report.mask_seconds = step.seconds
        if step.other:
            self._judge(step.other, report, patience is not None)
        if self._late:
            self._settle(step)
        return step

    def _collect(self, patience: float | None, alone: bool) -> StepMasks:
        """Collect the step; rows whose worker lacks their history, or is gone, are sent once more, with all of it."""
        limit = self._fill_limit
        if patience is not None:
            # Beside rows without a constraint nobody has to be waited for, not even the first.
            limit = min(limit, max(patience, _ALONE_SECONDS) if alone else patience)
        deadline = time.monotonic() + limit
        step = self._pool.collect(None, limit, patience)
        again = [index for index, row in step.other.items() if row.state in ("needs_history", "unplaced")]
        if again:
            if patience is None:
                deadline = time.monotonic() + limit
            for index in again:
                if step.other[index].state == "unplaced":
                    self._late.pop(self._rows[index].sequence_id, None)  # its time starts anew
            step.keep()
            self._pool.submit([Fill(row.sequence_id, 0, row.token_ids) for row in (self._rows[i] for i in again)])
            left = max(0.0, deadline - time.monotonic())
            if patience is not None and len(again) < len(step):
                left = min(left, patience)
            step.update(self._pool.collect(None, left, patience), again)
        return step

    def _judge(self, others: Mapping[int, Row], report: ApplyReport, parking: bool) -> None:
        """Sort rows that aren't ready into failed and, with `parking`, late."""
        now = time.monotonic()
        for index, row in others.items():
            sequence_id = self._rows[index].sequence_id
            if row.state == "unplaced":
                self._late[sequence_id] = now  # how long it may wait is the pool's to say
                report.late.append(sequence_id)
                continue
            if parking and row.state != "failed":
                since = self._late.setdefault(sequence_id, self._asked)
                if now - since < self._fill_limit:
                    report.late.append(sequence_id)
                    continue
            if row.state == "late":
                error: GuidedError = MaskTimeout(f"no mask within {self._fill_limit:g} s")
            else:
                error = row.error or BackendError("the worker lost this sequence's history twice")
            report.failed[sequence_id] = error
            self._close([sequence_id])

    def _settle(self, step: StepMasks) -> None:
        """Those who were late and aren't any more."""
        for part in step.ready:
            for index in part.indices.tolist():
                self._late.pop(self._rows[index].sequence_id, None)

    def settled(self, timeout: float = 0.0) -> list[int]:
        """Late sequences to prepare again, with the tokens and logits they had: their masks are there, or failed.

        Waits for the first, `timeout` seconds at the most. One whose time is up is among them too.
        """
        if not self._late:
            return []
        now = time.monotonic()
        limit = self._fill_limit
        overdue = [each for each, since in self._late.items() if now - since >= limit]
        timeout = 0.0 if overdue else min(timeout, limit - now + min(self._late.values()))
        return sorted({*overdue, *self._pool.settled(list(self._late), timeout)})

    def failures(self) -> dict[str, GuidedError]:
        """Requests whose matcher was lost between steps (its worker died), each reported once."""
        if self._leaving:
            self._release()
        lost: dict[str, GuidedError] = {}
        for sequence_id, error in self._pool.failures().items():
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                lost[sequence.request_id] = error
        return lost

    def free(self, request_id: str) -> None:
        """The request is over, for whatever reason: close its matchers and let go of its grammar. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._close(list(request.sequences))
        self._leaving.append(request.future)
        self._release()

    def _release(self) -> None:
        """Let go of grammars that nobody uses; those still being compiled when their request ended wait for it."""
        waiting: list[Future[Grammar]] = []
        for future in self._leaving:
            if not future.done():
                waiting.append(future)
            elif future.exception() is None:
                self._pool.release(future.result())
        self._leaving = waiting

    def rollback(self, sequence_id: int, length: int) -> None:
        """What was prepared of this sequence is so no more, beyond its first `length` output tokens (a rejected draft).

        Only needed where tokens change; a history that has merely become shorter is noticed. Unknown ids are ignored.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.sent = min(sequence.sent, length)

    def free_sequence(self, sequence_id: int) -> None:
        """One sequence of a request is over; the others go on. Idempotent."""
        self._close([sequence_id])

    def _close(self, sequence_ids: Collection[int]) -> None:
        self._pool.free(sequence_ids)
        for sequence_id in sequence_ids:
            self._late.pop(sequence_id, None)
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None and sequence.request_id in self._requests:
                self._requests[sequence.request_id].sequences.discard(sequence_id)
