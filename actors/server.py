"""StepServer: the worker's side of the channel. It handles requests, loads grammars and
fills the slot table.

The first thread reads requests, and fills the rows that are expected to be quick. The
second one fills those that are expected to be slow, because their last mask was. While
the first thread is stuck in a row all the same, the second one does its work. So a slow
row delays no quick one: llguidance and xgrammar release the interpreter lock. The two
never work on the same grammar, because its matchers may share state. A third thread
loads grammars and imports libraries: a row waits until its grammar is there, and delays
no other one. A fourth thread is the heartbeat, and does nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from socket import socket
from typing import Any

import numpy as np
from msgspec.msgpack import Decoder, encode

from actors.packages import CompileResult, receive, send_package
from actors.processes import thread_times
from actors.protocol import (
    ACTIVITIES,
    BEAT_SECONDS,
    CHECKED,
    EDIT,
    FAILED,
    FIRST,
    IDLE,
    IMPORT,
    LOAD,
    OK,
    POSITION,
    SECOND,
    SLOW_SECONDS,
    STEERED,
    WAKE,
    Edit,
    Failed,
    Fill,
    Free,
    Open,
    Request,
    SlotTable,
    Unload,
)
from guided.backends import Backends
from guided.backends.base import CompiledGrammar, guard
from guided.errors import BackendError, GuidedError, from_wire, to_wire
from guided.masks.worker import MaskWorker

_STUCK_SECONDS = 0.002
"""The first thread is stuck if it has filled no row for this long."""
ReceiveGrammar = Callable[[], Callable[[], Any]]
"""Waits for the next grammar of the engine, and returns a function that fetches it, an
encoded `CompileResult`. Raises EOFError when the connection is lost."""
_decode_requests = Decoder(list[Request]).decode
_decode_grammar = Decoder(CompileResult).decode
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _LoadedGrammar:
    """A grammar, for all sequences that are opened with it."""

    loaded: CompiledGrammar | GuidedError | None = None
    """The grammar, or why it cannot be loaded; None until it is there."""
    is_unloaded: bool = False
    """Whether the engine has dropped it before it was there."""
    seconds: float = SLOW_SECONDS
    """Seconds of its quickest mask, at most: an estimate for the first mask of a
    sequence."""


@dataclass(slots=True, eq=False)
class _Slot:
    """An open sequence."""

    number: int
    grammar: _LoadedGrammar
    request_id: str
    seconds: float
    """Seconds of its last mask, or the estimate for the first."""
    changes: list[Open | Edit] = field(default_factory=list)
    """Messages of the engine that the next thread that fills the row has to apply."""
    edits: int = 0
    """The edit count of the last one."""
    due: float = 0.0
    """`time.monotonic()` of the request, and as long as the row will take, as far as is
    known."""
    is_freed: bool = False
    """Whether the slot is to be freed, once the row is not being filled any more."""


class StepServer:
    """Serves one incarnation's step channel until the connection is lost.

    Args:
        worker: used by this server's threads only.
        backends: load the grammars.
        end, receive_grammar, table: connected to the engine.
        forced_tokens: look ahead for tokens without an alternative.
        give_up: called when the connection is lost; ends the process.
    """

    def __init__(
        self,
        worker: MaskWorker,
        backends: Backends,
        end: socket,
        receive_grammar: ReceiveGrammar,
        table: SlotTable,
        forced_tokens: bool,
        give_up: Callable[[], object],
    ) -> None:
        self._worker = worker
        self._backends = backends
        self._end = end
        self._receive_grammar = receive_grammar
        self._table = table
        self._forced_tokens = forced_tokens
        self._give_up = give_up
        self._busy = table.mark["busy"][0]
        self._since = table.mark["since"][0]
        self._lock = threading.Lock()
        """Protects the fields below. The second thread reads from `end` only while the
        first one fills a row."""
        self._slots: dict[int, _Slot] = {}
        self._wanted: dict[int, _Slot] = {}
        """Slots of which a mask is wanted, in the order of the requests."""
        self._grammars: dict[int, _LoadedGrammar] = {}
        """Grammars that may be opened, or that are being loaded, by number."""
        self._filling: list[_Slot | None] = [None, None]
        """The slots that the first two threads fill."""
        self._news = threading.Event()
        """Set when a frame was handled; cleared by the second thread."""
        loops = (self._serve, self._relieve, self._load_all, self._beat)
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), daemon=True)
            for loop in loops
        ]

    def start(self) -> None:
        """Serve, on daemon threads."""
        for thread in self._threads:
            thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        # A thread of this class does not take the CPU from the engine's thread when it
        # is woken up (sched(7)).
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            loop()
        except (EOFError, OSError):
            _log.info("the step server ends with its connection")
        except Exception:
            # a bug: the engine would wait for a worker that stays up without answering
            _log.exception("the step server ends")
        self._give_up()

    def _serve(self) -> None:
        """Body of the first thread."""
        while True:
            frame = receive(self._end)
            with self._lock:
                self._handle_frame(frame)
            self._news.set()
            while self._fill_next(FIRST):
                pass
            self._wake_engine()

    def _relieve(self) -> None:
        """Body of the second thread."""
        while True:
            if self._fill_next(SECOND):
                continue
            with self._lock:  # rows may have been left because of their grammar
                is_done = (
                    self._filling[FIRST] is None and next(self._able(), None) is None
                )
                is_stuck = self._is_stuck()
            if is_done or is_stuck:
                self._wake_engine()
            if is_done:
                self._news.wait()
                self._news.clear()
            elif is_stuck:
                wait([self._end], _STUCK_SECONDS)
            else:
                time.sleep(_STUCK_SECONDS)

    def _load_all(self) -> None:
        """Body of the third thread."""
        for number in count():
            loaded = self._load(number, self._receive_grammar())
            self._busy[LOAD] = self._busy[IMPORT] = IDLE
            with self._lock:
                grammar = self._grammars.setdefault(number, _LoadedGrammar())
                grammar.loaded = loaded
                if grammar.is_unloaded:
                    del self._grammars[number]
            del grammar, loaded  # they would stay in memory until the next one comes
            self._news.set()

    def _load(
        self, number: int, fetch: Callable[[], Any]
    ) -> CompiledGrammar | GuidedError:
        try:
            self._begin(IMPORT, number)
            with guard("loading a grammar"):
                result = _decode_grammar(fetch())
            with guard(result.backend):
                backend = self._backends[result.backend]
                self._begin(LOAD, number)
                self._busy[IMPORT] = IDLE
                return backend.load(result.constraint, result.dumped)
        except GuidedError as error:
            # without its traceback, which would keep the memory
            return from_wire(to_wire(error))

    def _begin(self, activity: int, subject: int) -> None:
        self._since[activity] = time.monotonic()
        self._busy[activity] = subject

    def _beat(self) -> None:
        """Body of the heartbeat. It publishes how long the other threads have run, and
        waited for a CPU."""
        mark = self._table.mark[0]
        mark["heart"] = threading.get_native_id()
        threads = [*self._threads[:-1], self._threads[LOAD]]
        began = np.zeros(len(ACTIVITIES))
        before = np.zeros((len(ACTIVITIES), 2))
        """Times at which the threads began, and their `thread_times` at the first
        heartbeat after that."""
        while True:
            # first: if this thread waits for a CPU now, the others seem to have waited
            # more
            now = time.monotonic()
            since = mark["since"].copy()
            times = np.array([thread_times(thread.native_id) for thread in threads])
            before[since != began] = times[since != began]
            began = since
            mark["times"] = np.maximum(times - before, 0.0)  # unreadable times are 0
            mark["beat"] = now
            time.sleep(BEAT_SECONDS)

    def _is_stuck(self) -> bool:
        """Return whether the first thread is stuck in a row. With the lock, it then
        does not read from `end`."""
        return (
            self._filling[FIRST] is not None
            and time.monotonic() - self._since[FIRST] > _STUCK_SECONDS
        )

    def _fill_next(self, thread: int) -> bool:
        """Fill the next row that a thread may fill. Returns whether there was one."""
        with self._lock:
            last = self._filling[thread]
            self._filling[thread] = None
            if last is not None and last.is_freed:
                self._free(last)
            slot = self._next(thread)
            if slot is None:
                return False
            del self._wanted[slot.number]
            target = int(self._table.target[slot.number])
            if target // EDIT != slot.edits:  # `Edit` or `Free` follows
                return True
            changes = slot.changes
            slot.changes = []
            self._filling[thread] = slot
            self._begin(thread, slot.number)
        self._fill(thread, slot, target, changes)
        return True

    def _able(self, avoided: _Slot | None = None) -> Iterator[_Slot]:
        """Return what may be filled now: its grammar is there, and it is not that of
        another row."""
        grammar = avoided and avoided.grammar
        return (
            slot
            for slot in self._wanted.values()
            if slot.grammar.loaded is not None and slot.grammar is not grammar
        )

    def _next(self, thread: int) -> _Slot | None:
        """Choose the next row. Each thread avoids the grammar that the other one
        uses."""
        is_stuck = self._is_stuck()
        while is_stuck and wait([self._end], 0):
            self._handle_frame(receive(self._end))
        other = self._filling[1 - thread]
        if thread == SECOND and not is_stuck:
            # Quicker ones first, but each one waits about as long as it takes, at most.
            slow = [slot for slot in self._able(other) if slot.seconds >= SLOW_SECONDS]
            if slow or other is not None:
                return min(slow, key=lambda slot: slot.due, default=None)
            # If there is none: quick rows that the first thread has left, because of
            # their grammar.
        return next(
            (slot for slot in self._able(other) if slot.seconds < SLOW_SECONDS), None
        )

    def _handle_frame(self, frame: Any) -> None:
        for request in _decode_requests(frame):
            match request:
                case Fill():
                    for number in np.frombuffer(request.slots, np.int32).tolist():
                        self._want(number)
                case Unload():
                    for number in request.numbers:
                        grammar = self._grammars[number]
                        grammar.is_unloaded = True
                        if grammar.loaded is not None:
                            del self._grammars[number]
                case Free():
                    slot = self._slots[request.slot]
                    self._wanted.pop(slot.number, None)
                    slot.is_freed = True
                    if slot not in self._filling:
                        self._free(slot)
                case Open() | Edit():
                    if isinstance(request, Open):
                        grammar = self._grammars.setdefault(
                            request.grammar, _LoadedGrammar()
                        )
                        self._slots[request.slot] = _Slot(
                            request.slot, grammar, request.request_id, grammar.seconds
                        )
                    slot = self._slots[request.slot]
                    slot.changes.append(request)
                    slot.edits = request.version // EDIT
                    self._want(slot.number)

    def _want(self, number: int) -> None:
        slot = self._slots[number]
        slot.due = time.monotonic() + slot.seconds
        self._wanted.pop(number, None)
        self._wanted[number] = slot

    def _free(self, slot: _Slot) -> None:
        number = slot.number
        self._worker.free([number])
        del self._slots[number]
        self._table.status[number] = OK
        self._table.ready[number] = self._table.target[number]

    def _fill(
        self, thread: int, slot: _Slot, target: int, changes: list[Open | Edit]
    ) -> None:
        table = self._table
        number = slot.number
        error: GuidedError | None
        try:
            self._apply(slot, changes)
            length = target & POSITION
            new = length - self._worker.length(number)
            if new not in (0, 1):
                raise BackendError(
                    f"the worker knows {length - new} output tokens of slot {number}, not {length}"
                )
            error = self._worker.fill(
                number, [int(table.tokens[number])][:new], table.mask[number]
            )
        except GuidedError as raised:
            error = raised
        if error is None and self._forced_tokens:
            self._worker.look_ahead(number, table.mask[number], table.forced[number])
        seconds = time.monotonic() - self._since[thread]
        slot.seconds = table.seconds[number] = seconds
        slot.grammar.seconds = min(slot.grammar.seconds, seconds)
        if error is not None:
            _log.warning(
                "request %s (slot %d) failed: %s: %s",
                slot.request_id,
                number,
                error.code,
                error,
            )
            send_package(self._end, encode(Failed(number, target, to_wire(error))))
            table.status[number] = FAILED  # the message is there
        else:
            status = STEERED * (number in self._worker.steered)
            vetoed = self._worker.vetoed.get(number)
            if vetoed is not None:
                status |= CHECKED
                table.veto[number] = vetoed.report()
            table.status[number] = status
            table.ready[number] = target
        self._busy[thread] = IDLE

    def _apply(self, slot: _Slot, changes: list[Open | Edit]) -> None:
        loaded = slot.grammar.loaded
        assert loaded is not None
        for change in changes:
            if isinstance(change, Edit):
                self._worker.edit(slot.number, change.start, change.tokens)
            elif isinstance(loaded, GuidedError):
                raise loaded.with_traceback(None)
            else:
                self._worker.open(
                    slot.number, loaded, change.tokens, change.budget, change.final
                )

    def _wake_engine(self) -> None:
        if self._table.wake[0]:
            self._table.wake[0] = 0
            send_package(self._end, WAKE)
