"""Masker: the guided rows of somebody else's batch, masked whatever happens to one of them.

The engine around it knows no parked rows and no failed ones. So every mask is waited for, up to a hard limit, and who
has no mask is allowed one token only: a stop token, which ends the request. Why it ended is reported out of band.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import words
from guided.errors import CompileTimeout, GuidedError, InternalError, PoolUnavailable, TokenRejected, bounded
from guided.integrations.pools import Opening
from guided.integrations.vllm.forcing import allow_only, free_what_is_allowed, one_token_masks
from guided.integrations.vllm.request_params import Asked
from guided.kernel import apply_bitmask
from guided.pool import Grammar, MaskPool
from guided.processor import ApplyReport, GuidedRow, LogitPostProcessor

if TYPE_CHECKING:
    import torch

__all__ = ["Guest", "GuestRow", "Masker", "Ranks"]

_log = logging.getLogger("guided.integrations")
UNKNOWN = InternalError(
    "the engine doesn't know this output's last token when it has to be masked: vLLM's asynchronous scheduling tells "
    "it only to logits processors that are passed by name (--logits-processors "
    "guided.integrations.vllm.processor:GuidedLogitsProcessor), not to those of entry points"
)


class Ranks(Protocol):
    """Processes that mask the same batch, each its own copy of the logits: one computes, and all use its masks."""

    computes: bool
    """This is the one."""

    def share(self, bitmask: NDArray[np.int32]) -> None:
        """Where it is computed: send. Elsewhere: overwrite with what was sent. Every process calls it alike."""


@dataclass(eq=False, slots=True)
class Guest:
    """One guided request in the engine's batch. Made by `Masker.begin`."""

    name: str
    """Unique within the masker's life."""
    asked: Asked | None
    """None: it can't be masked."""
    request_id: str | None
    """What it is reported by, where it has something."""
    stop_token: int
    """What ends it."""
    contested: bool
    """The engine may have forbidden all that a mask allows before it is applied."""
    error: GuidedError | None = None
    grammar: Future[Grammar] | None = None
    sequences: list[int] = field(default_factory=list)
    """One, and one more for each draft token."""
    settled: dict[int, int] = field(default_factory=dict)
    """By number of draft tokens: how many of the tokens that its sequence was last told of can't be taken back."""


class GuestRow(NamedTuple):
    """One row of the logits of this step."""

    guest: Guest
    logits_row: int
    token_ids: Sequence[int]
    """All output tokens before it, by reference."""
    drafts: int = 0
    """How many of them, the last ones, are guesses that may be rejected in this step."""


class Masker:
    """Masks the guided rows of an engine's batches. From one thread; nothing is raised for what is wrong with a row.

    Args:
        pool: where masks are computed; asked for with the first request, and not closed here.
        report: told of a request that ends because of an error: the id that it reports by, and the error.
        ranks: where several processes mask the same batch; None where there is one.
        width: of the logits.
        fill_limit: seconds that a mask may take.
        wait_limit: seconds that a row may wait for its grammar, and for a worker while none is up. The engine waits
            with it.
        pool_limit: seconds that the first request may wait for the pool.
    """

    def __init__(
        self,
        pool: Opening,
        report: Callable[[str, GuidedError], None],
        ranks: Ranks | None,
        width: int,
        *,
        fill_limit: float = 5.0,
        wait_limit: float = 15.0,
        pool_limit: float = 120.0,
    ) -> None:
        self._opening = pool
        self._report = report
        self._ranks = ranks
        self._width = width
        self._limits = fill_limit, wait_limit, pool_limit
        self._processor: LogitPostProcessor | None = None
        self._pool: MaskPool | None = None
        self._names = itertools.count()
        self._sequence_ids = itertools.count()
        self._guests: dict[str, Guest] = {}
        self._rows: Sequence[GuestRow] = ()
        self._forced: list[int] = []
        """Of this step's rows: those that are allowed one token only."""
        self._sent: dict[int, int] = {}
        """Sequence id -> which of this step's rows: those whose mask is being computed."""
        self._guided: list[GuidedRow] = []
        """The same rows, as they were sent."""
        self._gathers = False
        """This step's masks are gathered first, rather than written to the logits one by one."""
        self._under_way = False

    def begin(
        self, asked: Asked | Exception, stop_token: int, contested: bool = False, request_id: str | None = None
    ) -> Guest:
        """A request enters the batch: have its constraint compiled.

        Args:
            asked: what for; an error where that is not known, or can't be done: it fails with the first row.
            request_id: to report that error by.
        """
        what = None if isinstance(asked, Exception) else asked
        guest = Guest(
            str(next(self._names)), what, request_id if what is None else what.request_id, stop_token, contested
        )
        self._guests[guest.name] = guest
        if isinstance(asked, Exception):
            self.fail(guest, asked)
        elif self.computes:
            self._opening.ask()
            if self._pool_is_there():
                self._compile(guest)
        return guest

    def end(self, guest: Guest) -> None:
        """It has left the batch. Idempotent."""
        self._guests.pop(guest.name, None)
        self.rest(guest)

    def rest(self, guest: Guest) -> None:
        """Give back what it holds; with its next row it is opened again, from its tokens."""
        if guest.grammar is not None and self._processor is not None:
            try:
                self._processor.free(guest.name)
            except Exception:
                _log.exception("what request %s held can't be given back", guest.request_id or "without an id")
        guest.grammar = None
        guest.sequences.clear()
        guest.settled.clear()

    @property
    def computes(self) -> bool:
        """This process does, rather than take another's masks."""
        return self._ranks is None or self._ranks.computes

    # before the forward pass, where the tokens are known by then

    def prepare(self, rows: Sequence[GuestRow], wait: bool = False) -> bool:
        """Have this step's masks computed; `apply` follows, or the next `prepare`.

        Args:
            wait: for whatever isn't there: the pool, grammars.

        Returns:
            Whether it could be done: without `wait`, when something isn't there yet (a token, too), nothing was.
        """
        if self._under_way:
            self._give_up_step()
        self._rows, self._forced, self._sent = rows, [], {}
        self._gathers = self._ranks is not None or any(row.guest.contested for row in rows)
        if not self.computes or not rows:
            return True
        try:
            if not wait and any(_is_unknown(row) for row in rows):
                return False
            if not self._open_pool(rows, wait) or not self._open_grammars(rows, wait):
                return False
            self._send(rows)
        except Exception as error:
            self._break(error)
        return True

    def _open_pool(self, rows: Sequence[GuestRow], wait: bool) -> bool:
        if self._pool_is_there():
            return True
        if all(row.guest.error is not None for row in rows):
            return True
        opening = self._opening.ask()
        if not opening.done() and not wait:
            return False
        try:
            opening.result(self._limits[2])
            self._pool_is_there()
        except TimeoutError:
            self._fail_all(rows, PoolUnavailable(f"the mask pool didn't open within {self._limits[2]:g} s"))
        except GuidedError as error:
            self._fail_all(rows, error if isinstance(error, InternalError) else PoolUnavailable(str(error)))
        return True

    def _pool_is_there(self) -> bool:
        if self._processor is None:
            opening = self._opening.ask()
            if opening.done() and opening.exception() is None:
                self._pool = opening.result()
                self._processor = LogitPostProcessor(self._pool, self._limits[0])
        return self._processor is not None

    def _compile(self, guest: Guest) -> None:
        assert self._processor is not None
        assert guest.asked is not None
        try:
            guest.grammar = self._processor.initialize(guest.name, guest.asked.constraint, guest.asked.backend)
        except Exception as error:
            self.fail(guest, error)

    def _open_grammars(self, rows: Sequence[GuestRow], wait: bool) -> bool:
        """Every row's grammar is there, or its request has failed; False: not yet."""
        deadline = time.monotonic() + self._limits[1]
        for guest in {row.guest.name: row.guest for row in rows if row.guest.error is None}.values():
            if guest.grammar is None:
                self._compile(guest)
            if guest.grammar is None:
                continue
            if not guest.grammar.done() and not wait:
                return False
            try:
                guest.grammar.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self.fail(guest, CompileTimeout(f"the constraint didn't compile within {self._limits[1]:g} s"))
            except Exception as error:
                self.fail(guest, error)
        return True

    def _send(self, rows: Sequence[GuestRow]) -> None:
        processor = self._processor
        if processor is None:  # there is no pool: all have failed
            self._forced = list(range(len(rows)))
            return
        lost = processor.failures()
        if lost:
            self._lose(lost, rows)
        self._guided = guided = []
        for index, row in enumerate(rows):
            guest = row.guest
            if guest.error is None and _is_unknown(row) and not row.drafts:
                self.fail(guest, UNKNOWN)
            if guest.error is not None or self._is_over(row):
                self._forced.append(index)
                continue
            sequence_id = self._sequence(guest, row.drafts)
            self._sent[sequence_id] = index
            parent = guest.sequences[0] if row.drafts else None
            place = index if self._gathers else row.logits_row
            if row.drafts:
                processor.rollback(sequence_id, guest.settled.get(row.drafts, 0))
                guest.settled[row.drafts] = len(row.token_ids) - row.drafts
            guided.append(GuidedRow(guest.name, sequence_id, row.token_ids, place, parent))
        processor.prepare(guided)
        self._under_way = True

    def _lose(self, lost: Mapping[str, GuidedError], rows: Sequence[GuestRow]) -> None:
        """Matchers were lost between steps. Of an output that is complete nobody needs one."""
        complete = {row.guest.name for row in rows if not row.drafts and self._is_over(row)}
        for name, error in lost.items():
            if name in self._guests and name not in complete:
                self.fail(self._guests[name], error)

    def _is_over(self, row: GuestRow) -> bool:
        """Nothing is sampled here: the output has ended (and the engine doesn't know yet), or this guess is none."""
        tail = row.token_ids[-max(1, row.drafts) :]
        assert self._pool is not None
        stops = self._pool.vocabulary.stop_token_ids
        return any(token in stops or token == row.guest.stop_token or token < 0 for token in tail)

    def _sequence(self, guest: Guest, drafts: int) -> int:
        while len(guest.sequences) <= drafts:
            guest.sequences.append(next(self._sequence_ids))
        return guest.sequences[drafts]

    def _give_up_step(self) -> None:
        """The engine had no use for what was prepared."""
        self._under_way = False
        try:
            assert self._processor is not None
            assert self._pool is not None
            size = words(self._pool.vocabulary.padded_vocab_size)
            rows = 1 + max((len(self._rows), *(row.logits_row for row in self._rows)))
            report = self._processor.collect(np.empty((rows, size), np.int32))
            report.late.clear()  # there may be a worker when they are asked for again
            self._judge(report)
        except Exception as error:
            self._break(error)

    # after it

    def apply(self, logits: torch.Tensor) -> None:
        """Write -inf over all that this step's rows may not become, in place.

        Args:
            logits: float `[rows, width]`, any device.
        """
        if not self._rows:
            return
        try:
            if self._gathers:
                self._apply_gathered(logits)
                return
            if self._under_way:
                self._under_way = False
                assert self._processor is not None
                self._judge(self._collect(partial(self._processor.apply, logits)))
        except Exception as error:
            self._break(error)
        if self._forced:
            rows = [self._rows[index] for index in self._forced]
            allow_only(logits, [row.logits_row for row in rows], [row.guest.stop_token for row in rows])

    def _apply_gathered(self, logits: torch.Tensor) -> None:
        bitmask = np.zeros((len(self._rows), words(self._width)), np.int32)
        if self._under_way:
            self._under_way = False
            try:
                assert self._processor is not None
                self._judge(self._collect(partial(self._processor.collect, bitmask)))
            except Exception as error:
                self._break(error)
        if self._forced:
            stops = [self._rows[index].guest.stop_token for index in self._forced]
            bitmask[self._forced] = one_token_masks(stops, bitmask.shape[1])
        if self._ranks is not None:
            self._ranks.share(bitmask)
        contested = [row.guest.contested for row in self._rows]
        rows = [row.logits_row for row in self._rows]
        free_what_is_allowed(logits, bitmask, rows, contested)
        apply_bitmask(logits, bitmask, rows)

    def _collect(self, take: Callable[[], ApplyReport]) -> ApplyReport:
        """This step's masks. Rows that no worker is there for are asked for again until one is, or for too long.

        Args:
            take: what was prepared last.
        """
        report = take()
        if not report.late:
            return report
        assert self._processor is not None
        deadline, waiting = time.monotonic() + self._limits[1], set(report.late)
        while waiting and (left := deadline - time.monotonic()) > 0:
            settled = waiting.intersection(self._processor.settled(left))
            if settled:
                self._processor.prepare([row for row in self._guided if row.sequence_id in settled])
                again = take()
                report.failed |= again.failed
                waiting = waiting - settled | set(again.late)
        for sequence_id in waiting:
            report.failed[sequence_id] = PoolUnavailable(f"no mask actor was up for {self._limits[1]:g} s")
        return report

    def _judge(self, report: ApplyReport) -> None:
        for sequence_id, error in report.failed.items():
            index = self._sent[sequence_id]
            row = self._rows[index]
            # A guess that the constraint doesn't allow: the engine rejects it where it was made, one row before.
            if not (row.drafts and isinstance(error, TokenRejected)):
                self.fail(row.guest, error)
        self._forced = [
            index
            for index, row in enumerate(self._rows)
            if index in self._forced or row.guest.error is not None or self._failed_row(index, report)
        ]

    def _failed_row(self, index: int, report: ApplyReport) -> bool:
        return any(self._sent[sequence_id] == index for sequence_id in report.failed)

    # what goes wrong

    def _fail_all(self, rows: Sequence[GuestRow], error: Exception) -> None:
        for row in rows:
            self.fail(row.guest, error)

    def fail(self, guest: Guest, error: BaseException) -> None:
        """It ends: from now on it is allowed its stop token only."""
        if guest.error is not None:
            return
        known = error if isinstance(error, GuidedError) else InternalError(bounded(f"{type(error).__name__}: {error}"))
        guest.error = known
        request_id = guest.request_id
        _log.error("guided request %s ends: %s", request_id or "without an id", known)
        if self.computes and request_id is not None:
            try:
                self._report(request_id, known)
            except Exception:
                _log.exception("why request %s ended can't be reported", request_id)
        self.rest(guest)

    def break_off(self, rows: Sequence[GuestRow], error: Exception) -> None:
        """Instead of `prepare`: it isn't known what these rows may become. Their requests end."""
        self._rows = rows
        self._gathers = self._ranks is not None
        self._break(error)

    def _break(self, error: Exception) -> None:
        """What should not happen: this step's requests end, and later ones start anew."""
        _log.error("masks can't be computed", exc_info=error)
        self._fail_all(self._rows, error)
        self._forced = list(range(len(self._rows)))
        self._under_way = False
        for guest in self._guests.values():
            self.rest(guest)
        if self._pool is not None:
            self._processor = LogitPostProcessor(self._pool, self._limits[0])


def _is_unknown(row: GuestRow) -> bool:
    return bool(row.token_ids) and row.token_ids[-1] < 0
