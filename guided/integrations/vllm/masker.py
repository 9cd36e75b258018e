"""Masker: masks the guided rows of a vLLM batch.

vLLM has neither late nor failed rows. So the masker waits for every mask, up to a limit, and a row without a valid mask
is allowed one token only: a stop token, which ends its request. The error is reported out of band.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from guided.bitmask import pack, words
from guided.errors import CompileTimeout, GuidedError, InternalError, PoolUnavailable, TokenRejected, bounded
from guided.integrations.blocking import finish_step
from guided.integrations.pools import PoolOpener
from guided.integrations.vllm.request_params import GuidedParams
from guided.kernel import apply_bitmask
from guided.pool import Grammar
from guided.processor import ApplyReport, GuidedProcessor
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
"""Lowest logit of an allowed token in requests with `other_bans`: sampled only if nothing else is left."""


@dataclass(eq=False, slots=True)
class GuidedRequest:
    """One guided request in the engine's batch. Made by `Masker.begin`."""

    name: str
    params: GuidedParams | None
    """None: the parameters are invalid, and the request fails."""
    report_id: str | None
    """The id that an error is reported under, if there is one."""
    stop_token: int
    other_bans: bool
    """Other parameters or processors may write -inf to every token that a mask allows, before it is applied."""
    error: GuidedError | None = None
    grammar: Future[Grammar] | None = None
    sequences: list[GuidedSequence] = field(default_factory=list)
    """By number of draft tokens: each row of a request has a matcher of its own."""
    committed: dict[int, int] = field(default_factory=dict)
    """By number of draft tokens: how many of the tokens that were last prepared cannot be rejected."""


class GuidedRow(NamedTuple):
    """One guided row of a step's logits."""

    request: GuidedRequest
    logits_row: int
    token_ids: Sequence[int]
    """All output tokens before it, by reference."""
    drafts: int = 0
    """How many of them, at the end, are draft tokens, which may be rejected in this step."""


class Masker:
    """Masks the guided rows of an engine's batches. Used from one thread. A row's error raises nothing.

    Args:
        pool: opened with the first request, and not closed here.
        report: called with the report id and the error of each request that fails.
        ranks: the processes that mask the same batch. None: only this one.
        width: number of logits.
        wait_limit: seconds that a row, and the engine, may wait for a grammar, or for a worker while none is up.
        pool_limit: seconds that the first request may wait for the pool.
    """

    def __init__(
        self,
        pool: PoolOpener,
        report: Callable[[str, GuidedError], None],
        ranks: Ranks | None,
        width: int,
        *,
        wait_limit: float = 15.0,
        pool_limit: float = 120.0,
    ) -> None:
        self._opener = pool
        self._report = report
        self._ranks = ranks
        self._width = width
        self._wait_limit, self._pool_limit = wait_limit, pool_limit
        self._processor: GuidedProcessor | None = None
        self._names = map(str, itertools.count())
        self._sequence_ids = itertools.count()
        self._requests: dict[str, GuidedRequest] = {}
        self._rows: Sequence[GuidedRow] = ()
        self._ended: set[int] = set()
        """Indices of this step's rows that need no mask: any further token is discarded."""
        self._prepared: dict[int, int] = {}
        """Sequence id -> index of its row, for the rows that were prepared."""
        self._sequences: tuple[GuidedSequence, ...] = ()
        self._logits_rows: list[int] = []
        self._gathers = False
        """This step's masks are copied to one bitmask first, instead of being applied where the workers wrote them."""
        self._in_step = False
        """The processor has a prepared step."""

    @property
    def computes(self) -> bool:
        """Whether this process computes the masks, instead of receiving them from another rank."""
        return self._ranks is None or self._ranks.computes

    # requests

    def begin(
        self, params: GuidedParams | Exception, stop_token: int, other_bans: bool = False, report_id: str | None = None
    ) -> GuidedRequest:
        """Add a request to the batch, and start to compile its constraint.

        Args:
            params: the guided parameters. An exception: they are invalid, and the request fails with it.
            report_id: the id that this exception is reported under.
        """
        valid = None if isinstance(params, Exception) else params
        report_id = report_id if valid is None else valid.request_id
        request = GuidedRequest(next(self._names), valid, report_id, stop_token, other_bans)
        self._requests[request.name] = request
        if isinstance(params, Exception):
            self.fail(request, params)
        elif self.computes:
            self._opener.open()
            if self._processor is not None:
                self._compile(request)
        return request

    def end(self, request: GuidedRequest) -> None:
        """Remove a request from the batch. Idempotent."""
        self._requests.pop(request.name, None)
        self.release(request)

    def release(self, request: GuidedRequest) -> None:
        """Free a request's grammar and matchers. Its next row opens them again, from its tokens."""
        if request.grammar is not None and self._processor is not None:
            self._discard_step()
            try:
                self._processor.free(request.name)
            except Exception:
                _log.exception("request %s can't be freed", request.report_id or "without an id")
        request.grammar = None
        request.sequences.clear()
        request.committed.clear()

    def fail(self, request: GuidedRequest, error: BaseException) -> None:
        """Report an error. From now on, the request's rows are allowed its stop token only."""
        if request.error is not None:
            return
        known = error if isinstance(error, GuidedError) else InternalError(bounded(f"{type(error).__name__}: {error}"))
        request.error = known
        _log.error("guided request %s fails: %s", request.report_id or "without an id", known)
        if self.computes and request.report_id is not None:
            try:
                self._report(request.report_id, known)
            except Exception:
                _log.exception("the error of request %s can't be reported", request.report_id)
        self.release(request)

    # before the forward pass, if all tokens are known by then

    def prepare(self, rows: Sequence[GuidedRow], wait: bool = False) -> bool:
        """Start to compute this step's masks. `apply` follows, or the next `prepare`.

        Args:
            wait: wait for the pool and for grammars. If not, False is returned if one, or a token, is missing.
        """
        self._discard_step()
        self._rows, self._ended, self._prepared = rows, set(), {}
        self._gathers = self._ranks is not None or any(row.request.other_bans for row in rows)
        if not self.computes or not rows:
            return True
        try:
            if not wait and any(_is_unknown(row) for row in rows):
                return False
            if not self._wait_for_pool(wait) or not self._wait_for_grammars(wait):
                return False
            self._submit()
        except Exception as error:
            self._fail_step(error)
        return True

    def _wait_for_pool(self, wait: bool) -> bool:
        """Open the pool, or fail the rows' requests. False: the pool is still opening."""
        if self._processor is not None or all(row.request.error is not None for row in self._rows):
            return True
        opening = self._opener.open()
        if not opening.done() and not wait:
            return False
        try:
            self._processor = GuidedProcessor(opening.result(self._pool_limit))
        except TimeoutError:
            self._fail_all(PoolUnavailable(f"the mask pool didn't open within {self._pool_limit:g} s"))
        except GuidedError as error:
            self._fail_all(error if isinstance(error, InternalError) else PoolUnavailable(str(error)))
        return True

    def _compile(self, request: GuidedRequest) -> None:
        assert self._processor is not None
        assert request.params is not None
        try:
            request.grammar = self._processor.initialize(
                request.name, request.params.constraint, request.params.backend
            )
        except Exception as error:
            self.fail(request, error)

    def _wait_for_grammars(self, wait: bool) -> bool:
        """Compile every row's grammar, or fail its request. False: one is still being compiled."""
        deadline = time.monotonic() + self._wait_limit
        for request in dict.fromkeys(row.request for row in self._rows if row.request.error is None):
            if request.grammar is None:
                self._compile(request)
            if request.grammar is None:
                continue
            if not request.grammar.done() and not wait:
                return False
            try:
                request.grammar.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self.fail(request, CompileTimeout(f"the constraint didn't compile within {self._wait_limit:g} s"))
            except Exception as error:
                self.fail(request, error)
        return True

    def _submit(self) -> None:
        rows, processor = self._rows, self._processor
        if processor is None:  # the pool can't be opened: all requests have failed
            return
        self._ended = {index for index, row in enumerate(rows) if self._has_ended(row)}
        complete = {rows[index].request.name for index in self._ended if not rows[index].drafts}
        for name, error in processor.failures().items():  # of requests that lost a matcher between steps
            if name in self._requests and name not in complete:
                self.fail(self._requests[name], error)
        sequences: list[GuidedSequence] = []
        self._logits_rows = []
        for index, row in enumerate(rows):
            if row.request.error is None and _is_unknown(row) and not row.drafts:
                self.fail(row.request, UNKNOWN_TOKEN)
            if row.request.error is not None or index in self._ended:
                continue
            sequence = self._sequence(row)
            self._prepared[sequence.sequence_id] = index
            sequences.append(sequence)
            self._logits_rows.append(index if self._gathers else row.logits_row)
        if self._sequences != tuple(sequences):  # the same tuple again costs least
            self._sequences = tuple(sequences)
        processor.prepare(self._sequences, self._logits_rows)
        self._in_step = True

    def _has_ended(self, row: GuidedRow) -> bool:
        """Whether the row's token is discarded: the output is complete, or a draft token before it is invalid."""
        assert self._processor is not None
        stops = self._processor.vocabulary.stop_token_ids
        last = row.token_ids[-max(1, row.drafts) :]
        return any(token in stops or token == row.request.stop_token or token < 0 for token in last)

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

    def _discard_step(self) -> None:
        """Finish a prepared step that the engine does not use. Late rows are prepared again with the next step."""
        if not self._in_step:
            return
        self._in_step = False
        try:
            assert self._processor is not None
            unused = np.empty((1 + max(self._logits_rows, default=0), words(self._width)), np.int32)
            self._fail_rows(self._processor.collect(unused))
        except Exception as error:
            self._fail_step(error)

    # after the forward pass

    def apply(self, logits: torch.Tensor) -> None:
        """Write -inf to all tokens that this step's rows must not become, in place. `logits`: float `[rows, width]`."""
        if not self._rows:
            return
        try:
            if self._gathers:
                self._apply_gathered(logits)
                return
            if self._processor is not None:
                self._finish_step(partial(self._processor.apply, logits))
        except Exception as error:
            self._fail_step(error)
        forced = [row for _, row in self._forced()]
        if forced:
            rows = [row.logits_row for row in forced]
            logits[rows] = float("-inf")
            logits[rows, [row.request.stop_token for row in forced]] = 0.0

    def _apply_gathered(self, logits: torch.Tensor) -> None:
        bitmask = np.zeros((len(self._rows), words(self._width)), np.int32)
        if self._processor is not None:
            try:
                self._finish_step(partial(self._processor.collect, bitmask))
            except Exception as error:
                self._fail_step(error)
        if self.computes:
            for index, row in self._forced():
                bitmask[index] = pack([row.request.stop_token], self._width)
        if self._ranks is not None:
            self._ranks.share(bitmask)
        apply_bitmask(logits, bitmask, [row.logits_row for row in self._rows], least=_FLOOR)

    def _finish_step(self, finish: Callable[[], ApplyReport]) -> None:
        if self._in_step:
            self._in_step = False
            assert self._processor is not None
            self._fail_rows(finish_step(self._processor, self._sequences, self._logits_rows, finish, self._wait_limit))

    def _fail_rows(self, report: ApplyReport) -> None:
        for sequence_id, error in report.failed.items():
            index = self._prepared[sequence_id]
            row = self._rows[index]
            if row.drafts and isinstance(error, TokenRejected):
                self._ended.add(index)  # the engine rejects the draft token in the row before
            else:
                self.fail(row.request, error)

    def _forced(self) -> list[tuple[int, GuidedRow]]:
        """This step's rows that are allowed their stop token only, and their indices."""
        return [(i, row) for i, row in enumerate(self._rows) if i in self._ended or row.request.error is not None]

    # errors of whole steps

    def _fail_all(self, error: Exception) -> None:
        for row in self._rows:
            self.fail(row.request, error)

    def fail_step(self, rows: Sequence[GuidedRow], error: Exception) -> None:
        """Fail the requests of `rows`, instead of `prepare`: their tokens are not available."""
        self._rows = rows
        self._gathers = self._ranks is not None
        self._fail_step(error)

    def _fail_step(self, error: Exception) -> None:
        """Fail this step's requests after an unexpected error, and start again with a new processor."""
        _log.error("masks can't be computed", exc_info=error)
        self._in_step = False
        self._fail_all(error)
        for request in self._requests.values():
            self.release(request)
        self._processor = None


def _is_unknown(row: GuidedRow) -> bool:
    """Whether the row's last token is vLLM's placeholder for a token that is not known yet."""
    return bool(row.token_ids) and row.token_ids[-1] < 0
