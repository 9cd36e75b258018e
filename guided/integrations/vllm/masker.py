"""Masker: computes the masks of the guided rows of a vLLM batch, in a pool.

A row is without a mask if its request has failed, or if the mask is late: not ready at the step's deadline. Such a row
is allowed one token only, a stop token. The caller discards that token, or it ends the request.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack, words
from guided.errors import GuidedError, InternalError, PoolUnavailable, TokenRejected, bounded
from guided.integrations.blocking import finish_step
from guided.integrations.vllm.request_params import GuidedParams
from guided.kernel import apply_bitmask
from guided.pools.opening import PoolOpener
from guided.pools.protocol import Grammar, MaskPool
from guided.post_processor import ApplyReport
from guided.processor import GuidedProcessor
from guided.sequence import GuidedSequence

if TYPE_CHECKING:
    import torch

    from guided.integrations.vllm.tensor_parallel import Ranks

_log = logging.getLogger("guided.integrations")
UNKNOWN_TOKEN = InternalError(
    "the last token of this output is unknown when it has to be masked: with asynchronous scheduling, vLLM passes it "
    "only to logits processors that are given by name (--logits-processors "
    "guided.integrations.vllm.processor:GuidedLogitsProcessor), not to those of entry points"
)
_FLOOR = -1e4
"""Lowest logit of an allowed token. vLLM, or another processor, may have written -inf to every token that a mask
allows: such a token is sampled only if nothing else is left."""


@dataclass(eq=False, slots=True)
class GuidedRequest:
    """One guided request in the engine. Made by `Masker.begin`."""

    name: str
    report_id: str | None
    """The id that an error is reported under, if there is one."""
    stop_token: int
    compiled: Future[GuidedRequest] = field(default_factory=Future)
    """Ends with this request once its grammar is installed, or with the error that fails it."""
    error: GuidedError | None = None
    late: set[int] = field(default_factory=set)
    """Ids of the request's sequences with a late mask at the last `collect`."""
    ended: bool = False
    sequences: list[GuidedSequence] = field(default_factory=list)
    """By number of draft tokens: each row of a request has a matcher of its own."""
    committed: dict[int, int] = field(default_factory=dict)
    """By number of draft tokens: the number of last prepared tokens that cannot be rejected."""


class GuidedRow(NamedTuple):
    """One guided row of a step."""

    request: GuidedRequest
    logits_row: int
    token_ids: Sequence[int]
    """All output tokens before it, by reference."""
    drafts: int = 0
    """Number of draft tokens at their end, which may be rejected in this step."""


class Masker:
    """Computes the masks of an engine's batches. A row's error raises nothing.

    Used from one thread, except `begin`.

    Args:
        pool: an opener. The caller closes the pool.
        report: called with the id and the error of each request that fails, if it has an id; from any thread.
        width: number of logits.
        ranks: the processes that mask the same batch. None: only this one.
    """

    def __init__(
        self, pool: PoolOpener, report: Callable[[str, GuidedError], None], width: int, ranks: Ranks | None = None
    ) -> None:
        self._opener = pool
        self._report = report
        self._width = width
        self._ranks = ranks
        self.computes = ranks is None or ranks.computes
        """Whether this process computes the masks, instead of receiving them from another rank."""
        self._processor: GuidedProcessor | None = None
        self._lock = threading.Lock()
        """Guards `_processor` and the compilation of a request against its end."""
        self._names = map(str, itertools.count())
        self._sequence_ids = itertools.count()
        self._requests: dict[str, GuidedRequest] = {}
        self._rows: Sequence[GuidedRow] = ()
        self.discarded: set[int] = set()
        """Indices of the step's rows that come after the end of the output, or after an invalid draft token. They need
        no mask: the engine discards their tokens."""
        self._prepared: dict[int, int] = {}
        """Sequence id -> index of its row, for the rows that were prepared."""
        self._sequences: tuple[GuidedSequence, ...] = ()
        self._in_step = False
        """The processor has a prepared step."""

    # requests

    def begin(self, params: GuidedParams | Exception, stop_token: int, report_id: str | None = None) -> GuidedRequest:
        """Add a request, and compile its constraint once the pool is open. From any thread.

        Args:
            params: the guided parameters. An exception: they are invalid, and the request fails with it.
        """
        request = GuidedRequest(next(self._names), report_id, stop_token)
        self._requests[request.name] = request
        if isinstance(params, Exception):
            self.fail(request, params)
        elif self.computes:
            self._opener.open().add_done_callback(partial(self._compile, request, params))
        return request

    def _compile(self, request: GuidedRequest, params: GuidedParams, opening: Future[MaskPool]) -> None:
        try:
            pool = opening.result()
            with self._lock:
                if request.ended:
                    return
                self._processor = self._processor or GuidedProcessor(pool)
                grammar = self._processor.initialize(request.name, params.constraint, params.backend)
        except Exception as error:
            known = isinstance(error, InternalError) or not isinstance(error, GuidedError) or not opening.exception()
            self.fail(request, error if known else PoolUnavailable(str(error)))
        else:
            grammar.add_done_callback(partial(self._compiled, request))

    def _compiled(self, request: GuidedRequest, grammar: Future[Grammar]) -> None:
        if (error := grammar.exception()) is not None:
            self.fail(request, error)
        elif not request.compiled.done():
            request.compiled.set_result(request)

    def end(self, request: GuidedRequest) -> None:
        """Remove a request. Idempotent."""
        self._requests.pop(request.name, None)
        with self._lock:
            request.ended = True
        self.release(request)
        self._free(request, methodcaller("free", request.name))

    def release(self, request: GuidedRequest) -> None:
        """Close a request's matchers. Its next row opens them again, from its tokens."""
        if request.sequences:
            self._discard_step()
        for sequence in request.sequences:
            self._free(request, methodcaller("free_sequence", sequence.sequence_id))
        request.sequences.clear()
        request.committed.clear()
        request.late.clear()

    def _free(self, request: GuidedRequest, free: Callable[[GuidedProcessor], None]) -> None:
        try:
            if self._processor is not None:
                free(self._processor)
        except Exception:
            _log.exception("request %s can't be freed", request.report_id or "without an id")

    def fail(self, request: GuidedRequest, error: BaseException) -> None:
        """Report an error. From now on, the request's rows are allowed its stop token only. From any thread."""
        if request.error is not None:
            return
        known = error if isinstance(error, GuidedError) else InternalError(bounded(f"{type(error).__name__}: {error}"))
        request.error = known
        _log.error("guided request %s fails: %s", request.report_id or "without an id", known)
        try:
            if request.report_id is not None:
                self._report(request.report_id, known)
        except Exception:
            _log.exception("the error of request %s can't be reported", request.report_id)
        if not request.compiled.done():
            request.compiled.set_exception(known)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end an output. Empty until the pool is open."""
        return frozenset() if self._processor is None else frozenset(self._processor.vocabulary.stop_token_ids)

    # a step

    def prepare(self, rows: Sequence[GuidedRow], wait: float | None = None, error: Exception | None = None) -> bool:
        """Start to compute the masks of `rows`. `collect` or `apply` follows, or the next `prepare`.

        Args:
            wait: seconds to wait for grammars. Requests without one fail then. None: if a grammar or a token is
                missing, False is returned.
            error: why the tokens of `rows` are not available. Their requests fail.
        """
        self._discard_step()
        self._rows, self.discarded, self._prepared = rows, set(), {}
        if not self.computes or not rows:
            return True
        if wait is None and not all(_is_known(row) and _is_ready(row) for row in rows):
            return False
        self._wait_for_grammars(wait or 0.0)
        try:
            if error is not None:
                raise error
            self._submit()
        except Exception as failure:
            self._fail_rows(failure)
        return True

    def _wait_for_grammars(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for row in self._rows:
            if not _is_ready(row):
                try:
                    row.request.compiled.exception(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    message = f"the constraint is still being compiled after {seconds:g} s: send the request again"
                    self.fail(row.request, PoolUnavailable(message))

    def _submit(self) -> None:
        rows, processor = self._rows, self._processor
        if processor is None:  # the pool can't be opened: all requests have failed
            return
        sequences: list[GuidedSequence] = []
        stops = processor.vocabulary.stop_token_ids
        for index, row in enumerate(rows):
            last = row.token_ids[-max(1, row.drafts) :]
            if not _is_known(row):
                self.fail(row.request, UNKNOWN_TOKEN)
            elif any(token in stops or token == row.request.stop_token or token < 0 for token in last):
                self.discarded.add(index)  # the output is complete, or a draft token before it is invalid
        complete = {rows[index].request.name for index in self.discarded if not rows[index].drafts}
        for name, error in processor.failures().items():  # of requests that lost a matcher between steps
            if name in self._requests and name not in complete:
                self.fail(self._requests[name], error)
        for index, row in enumerate(rows):
            if row.request.error is None and index not in self.discarded:
                sequence = self._sequence(row)
                self._prepared[sequence.sequence_id] = index
                sequences.append(sequence)
        if self._sequences != tuple(sequences):  # the same tuple again costs least
            self._sequences = tuple(sequences)
        processor.prepare(self._sequences, list(self._prepared.values()))
        self._in_step = True

    def _sequence(self, row: GuidedRow) -> GuidedSequence:
        """Return the sequence of a row, with its current tokens."""
        request, drafts = row.request, row.drafts
        while len(request.sequences) <= drafts:
            parent_id = request.sequences[0].sequence_id if request.sequences else None
            request.sequences.append(
                GuidedSequence(request.name, next(self._sequence_ids), row.token_ids, parent_id=parent_id)
            )
        sequence = request.sequences[drafts]
        sequence.output_token_ids = row.token_ids
        if drafts:  # this sequence's last draft tokens may have been replaced by other tokens
            assert self._processor is not None
            self._processor.rollback(sequence.sequence_id, request.committed.get(drafts, 0))
            request.committed[drafts] = len(row.token_ids) - drafts
        return sequence

    def collect(self, deadline: float, may_be_late: bool = False) -> NDArray[np.int32]:
        """Wait for the masks of the prepared rows.

        Args:
            deadline: seconds to wait at most.
            may_be_late: a row without its mask by then is late. Otherwise its request fails.

        Returns:
            int32 `[rows, words]`. Rows of failed and late requests allow their stop token only. So do rows with a
            token that is discarded in any case: after the end of the output, or after an invalid draft token.
        """
        bitmask = np.empty((len(self._rows), words(self._width)), np.int32)
        computed = set(self._prepared.values()) if self._in_step else set()
        if self._in_step:
            self._in_step = False
            assert self._processor is not None
            collect = partial(self._processor.collect, bitmask, deadline)
            try:
                if may_be_late:
                    self._record_report(collect())
                else:
                    lines = list(self._prepared.values())
                    self._record_report(finish_step(self._processor, self._sequences, lines, collect, deadline))
            except Exception as error:
                self._fail_rows(error)
        for index, row in enumerate(self._rows):
            without = index not in computed or index in self.discarded
            if without or row.request.error is not None or row.request.late:
                bitmask[index] = pack([row.request.stop_token], self._width)
        return bitmask

    def _record_report(self, report: ApplyReport) -> None:
        for index in self._prepared.values():
            self._rows[index].request.late.clear()
        for sequence_id in report.late:
            self._rows[self._prepared[sequence_id]].request.late.add(sequence_id)
        for sequence_id, error in report.failed.items():
            index = self._prepared[sequence_id]
            row = self._rows[index]
            if row.drafts and isinstance(error, TokenRejected):
                self.discarded.add(index)  # the engine rejects the draft token in the row before
            else:
                self.fail(row.request, error)

    def apply(self, logits: torch.Tensor, deadline: float) -> None:
        """Write -inf to all tokens that the masks of the prepared rows forbid, in place.

        Args:
            logits: float `[rows, width]`.
            deadline: seconds to wait at most. Requests without a mask fail then.
        """
        if not self._rows:
            return
        bitmask = self.collect(deadline)
        if self._ranks is not None:
            self._ranks.share(bitmask)
        rows = [row.logits_row for row in self._rows]
        try:
            apply_bitmask(logits, bitmask, rows, least=_FLOOR)
        except Exception as error:
            self._fail_rows(error)
            logits[rows] = float("-inf")
            logits[rows, [row.request.stop_token for row in self._rows]] = 0.0

    def decided(self) -> set[int]:
        """Return the ids of late sequences that are decided: their masks are ready, or they failed."""
        self._discard_step()
        return set() if self._processor is None else set(self._processor.decided())

    def _discard_step(self) -> None:
        """Finish a prepared step that the engine does not use."""
        if self._in_step:
            self.collect(0.0, may_be_late=True)

    def _fail_rows(self, error: Exception) -> None:
        """Fail this step's requests after an unexpected error."""
        _log.error("masks can't be computed", exc_info=error)
        self._in_step = False
        for row in self._rows:
            self.fail(row.request, error)


def _is_known(row: GuidedRow) -> bool:
    """Whether the row's last token is known, not a placeholder of vLLM's. Invalid draft tokens count as known."""
    return bool(row.drafts) or not row.token_ids or row.token_ids[-1] >= 0


def _is_ready(row: GuidedRow) -> bool:
    """Whether the row's request has its grammar, or has failed."""
    return row.request.compiled.done() or row.request.error is not None
