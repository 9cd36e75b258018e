"""Masker: the masks of the guided rows of vLLM's batch, from a pool.

A row is without a mask if its request has failed, or if the mask is late: not ready at
the step's deadline. Such a row is allowed a stop token only, and vLLM discards the
token that is sampled from it. An error of a row raises nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.errors import GuidedError, InternalError, TokenRejected, bounded
from guided.integrations.vllm.request_params import GuidedParams
from guided.pools.protocol import Grammar, MaskPool
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import ApplyReport
from guided.sequence import GuidedSequence

_log = logging.getLogger("guided.integrations")


@dataclass(eq=False, slots=True)
class GuidedRequest:
    """One guided request in the engine."""

    request_id: str
    """vLLM's internal id, which it makes unique."""
    stops: frozenset[int] = frozenset()
    """Tokens at which vLLM ends the request, without the vocabulary's stop tokens. They
    are allowed only where the constraint is satisfied."""
    compiled: Future[GuidedRequest] = field(default_factory=Future)
    """A future that ends with this request when its grammar is compiled. It stays open
    if the request fails before."""
    error: GuidedError | None = None
    late: set[int] = field(default_factory=set)
    """Ids of the request's sequences with a late mask at the last `collect`."""
    sequences: list[GuidedSequence] = field(default_factory=list)
    """The sequences of the request's rows, by number of draft tokens: each row has a
    matcher of its own."""
    committed: dict[int, int] = field(default_factory=dict)
    """The number of prepared tokens that cannot be rejected any more, by number of
    draft tokens of the row."""

    tokens: list[int] = field(default_factory=list)
    """Output tokens that the grammar has consumed, without those of the reasoning."""
    masks: Sequence[NDArray[np.int32]] | NDArray[np.int32] = ()
    """The masks of the last step, `[1 + drafts, words]`."""
    is_missing: bool = False
    """Whether a row of the last step had no mask: it failed, was late, or its grammar
    is still being compiled."""

    def is_decided(self, decided: Set[int]) -> bool:
        """Return whether the grammar is compiled, and the masks are there that were
        late.

        Args:
            decided: what `Masker.decided` returned.
        """
        return self.error is None and self.compiled.done() and self.late <= decided


class GuidedRow(NamedTuple):
    """One guided row of a step."""

    request: GuidedRequest
    line: int
    """The line of the bitmask."""
    token_ids: Sequence[int]
    """All output tokens before the row, by reference."""
    drafts: int = 0
    """Number of draft tokens at the end of `token_ids`. They may be rejected in this
    step."""


class Masker:
    """Computes the masks of an engine's batches. Used from one thread, except `begin`.

    Args:
        report: called with vLLM's request id and the error of each request that fails;
            from any thread.
    """

    def __init__(
        self, pool: MaskPool, report: Callable[[str, GuidedError], None]
    ) -> None:
        self._processor = GuidedProcessor(pool)
        self._vocabulary = pool.vocabulary
        self._report = report
        self._sequence_ids = itertools.count()
        self.requests: dict[str, GuidedRequest] = {}
        """The requests that have not ended, by id. The thread that receives requests
        adds entries."""
        self._rows: Sequence[GuidedRow] = ()
        self._discarded: set[int] = set()
        """The lines of rows after a stop token, or after an invalid draft token."""
        self._prepared: dict[int, GuidedRow] = {}
        """The rows that were prepared, by sequence id."""
        self._batch: tuple[list[GuidedSequence], list[int]] = ([], [])
        """The sequences of the last step, and their lines."""
        self._number = 0
        """The number of this batch."""

    def begin(self, request: GuidedRequest, params: str | None) -> None:
        """Add a request, and compile its constraint. From any thread.

        Args:
            params: what `GuidedParams.to_text` wrote. Anything else fails the request.
        """
        self.requests[request.request_id] = request
        try:
            guided = GuidedParams.from_text(params)
            grammar = self._processor.initialize(
                request.request_id, guided.constraint, guided.backend
            )
            grammar.add_done_callback(partial(self._compiled, request))
        except Exception as error:
            self.fail(request, error)

    def _compiled(self, request: GuidedRequest, grammar: Future[Grammar]) -> None:
        if (error := grammar.exception()) is not None:
            self.fail(request, error)
        else:
            request.compiled.set_result(request)

    def end(self, request: GuidedRequest) -> None:
        """Remove a request: close its matchers and free its grammar. Idempotent."""
        self.requests.pop(request.request_id, None)
        self._prepared = {}  # a prepared step is given up
        request.late.clear()
        try:
            self._processor.free(request.request_id)
        except Exception:
            _log.exception("request %s can't be freed", request.request_id)

    def fail(self, request: GuidedRequest, error: BaseException) -> None:
        """Report an error. From now on, the request's rows have no mask. From any
        thread."""
        if request.error is None:
            if not isinstance(error, GuidedError):
                error = InternalError(bounded(f"{type(error).__name__}: {error}"))
            request.error = error
            self._report(request.request_id, error)

    def prepare(self, rows: Sequence[GuidedRow]) -> None:
        """Start to compute the masks of `rows`, but for known late ones. `collect` or
        another `prepare` follows."""
        self._rows = rows
        self._discarded = set()
        self._prepared = {}
        if rows:
            try:
                self._submit(rows)
            except Exception as error:
                self._fail_rows(error)

    def _submit(self, rows: Sequence[GuidedRow]) -> None:
        stops = set(self._vocabulary.stop_token_ids)
        decided = self.decided()
        batch: tuple[list[GuidedSequence], list[int]] = ([], [])
        for row in rows:
            row.request.is_missing = False
            if not stops.isdisjoint(row.token_ids[-max(1, row.drafts) :]):
                self._discarded.add(row.line)
            elif row.request.is_decided(decided):
                sequence = self._sequence(row)
                self._prepared[sequence.sequence_id] = row
                batch[0].append(sequence)
                batch[1].append(row.line)
        if batch != self._batch:
            self._batch = batch
            self._number += 1
        self._processor.prepare(*batch, self._number)

    def _sequence(self, row: GuidedRow) -> GuidedSequence:
        """Return the sequence of a row, with its current tokens."""
        request = row.request
        drafts = row.drafts
        while len(request.sequences) <= drafts:
            request.sequences.append(
                GuidedSequence(
                    request.request_id, next(self._sequence_ids), row.token_ids
                )
            )
        sequence = request.sequences[drafts]
        sequence.output_token_ids = row.token_ids
        # this sequence's last draft tokens may have been replaced by other tokens
        if drafts:
            self._processor.rollback(
                sequence.sequence_id, request.committed.get(drafts, 0)
            )
            request.committed[drafts] = len(row.token_ids) - drafts
        return sequence

    def collect(
        self, bitmask: NDArray[np.int32], deadline: float, patience: float = 0.0
    ) -> set[int]:
        """Write the masks of the prepared rows.

        Args:
            bitmask: int32 `[lines, words]`. The lines of rows without a mask allow a
                stop token only.
            deadline, patience: as for `GuidedProcessor.collect`. A row without its mask
                by then is late.

        Returns:
            The lines after a stop token or an invalid draft token. vLLM samples nothing
            from them.
        """
        if self._prepared:
            try:
                self._record_report(
                    self._processor.collect(bitmask, deadline, patience)
                )
            except Exception as error:
                self._fail_rows(error)
        computed = {row.line for row in self._prepared.values()}
        without = list(self._discarded)
        for row in self._rows:
            request = row.request
            if row.line not in self._discarded and (
                row.line not in computed or request.error or request.late
            ):
                request.is_missing = True
                without.append(row.line)
        if without:
            bitmask[without] = pack(
                self._vocabulary.stop_token_ids[:1], bitmask.shape[1] * 32
            )
        return self._discarded

    def _record_report(self, report: ApplyReport) -> None:
        for row in self._prepared.values():
            row.request.late.clear()
        for sequence_id in report.late:
            self._prepared[sequence_id].request.late.add(sequence_id)
        for sequence_id, error in report.failed.items():
            row = self._prepared[sequence_id]
            if row.drafts and isinstance(error, TokenRejected):
                # vLLM rejects the draft token in the row before
                self._discarded.add(row.line)
                self._number += 1  # the sequence is opened again
            else:
                self.fail(row.request, error)

    def decided(self) -> set[int]:
        """Return the ids of late sequences that are decided: their masks are ready, or
        they failed."""
        late = [
            sequence_id
            for request in self.requests.values()
            for sequence_id in request.late
        ]
        return set(self._processor.decided(late))

    def _fail_rows(self, error: Exception) -> None:
        """Fail this step's requests after an unexpected error."""
        _log.error("masks can't be computed", exc_info=error)
        self._prepared = {}
        for row in self._rows:
            self.fail(row.request, error)
