"""StepServer: the worker's side of the channel. It handles requests, loads grammars and fills the slot table.

The first thread reads requests, and fills the rows that are expected to be quick. The second one fills those that are
expected to be slow, because their last mask was. While the first thread is stuck in a row all the same, the second one
does its work. So a slow row delays no quick one: llguidance and xgrammar release the interpreter lock. The two never
work on the same grammar, because its matchers may share state. A third thread loads grammars and imports libraries: a
row waits until its grammar is there, and delays no other one. A fourth thread is the heartbeat, and does nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from mmap import mmap
from multiprocessing.connection import wait
from socket import socket
from typing import Any

import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.packages import CompileResult, buffer, receive_package, send_package
from actors.processes import thread_times
from actors.protocol import (
    BEAT_SECONDS,
    CHECKED,
    EDIT,
    FAILED,
    FIRST,
    IDLE,
    IMPORTING,
    LOADER,
    OK,
    POSITION,
    SECOND,
    SLOW_SECONDS,
    STEERED,
    THREADS,
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
from guided.worker import MaskWorker

_STUCK_SECONDS = 0.002
"""The first thread is stuck if it has filled no row for this long."""
ReceiveGrammar = Callable[[], Callable[[], Any]]
"""Waits for the next grammar of the engine, and returns a function that fetches it, an encoded `CompileResult`. Raises
EOFError when the connection is lost."""
_Wanted = tuple[int, int]
"""Version of a mask, and its newest token, if that is in the table."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Grammar:
    """A grammar, for all sequences that are opened with it."""

    loaded: CompiledGrammar | GuidedError | None = None
    """None: it is not there yet. An error: it cannot be loaded."""
    is_unloaded: bool = False
    """The engine no longer wants it, and it is not there yet."""
    seconds: float = SLOW_SECONDS
    """What its quickest mask took, at most: an estimate for the first one of a sequence."""


@dataclass(slots=True)
class _Slot:
    """An open sequence."""

    grammar: _Grammar
    request_id: str
    edit: int
    """The edit count of its output."""
    seconds: float
    """What its last mask took, or the estimate for the first."""
    wanted_at: float
    """`time.monotonic()` at which its mask was requested."""
    changes: list[Open | Edit]
    """What the engine has sent, and the thread that fills the row next has to apply."""
    freed: int | None = None
    """Version of its `Free`, which came while the row was being filled."""


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
        mark = table.mark  # writing an item of a memoryview takes half of the time that it takes in an array
        self._busy = mark["busy"][0].data
        self._spent: Any = mark["spent"][0].data
        self._filled = mark["filled"].data
        self._seconds: Any = table.seconds.data
        self._ready, self._wake = table.ready.data, mark["wake"]
        self._lock = threading.Lock()
        """For the following. The second thread reads from `end` only while the first one fills a row."""
        self._since = [0.0] * THREADS
        """`time.monotonic()` at which each thread began with what it does."""
        self._thread_ids = [0] * THREADS
        self._slots: dict[int, _Slot] = {}
        self._quick: dict[int, _Wanted] = {}
        self._slow: dict[int, _Wanted] = {}
        """Requested masks by slot: those that are expected to be quick, in the order of the requests; the others."""
        self._waiting: dict[int, _Wanted] = {}
        """Slots that wait for their grammar to be loaded."""
        self._grammars: dict[int, _Grammar] = {}
        """By number: those that may be opened, or that are being loaded."""
        self._filling: list[int | None] = [None, None]
        """The slot that each thread fills."""
        self._news = threading.Event()
        """Set when a frame was handled; cleared by the second thread."""
        self._decode = Decoder(list[Request]).decode
        self._read = Decoder(CompileResult).decode
        self._sending = threading.Lock()

    def start(self) -> None:
        """Serve, on daemon threads."""
        for index, loop in enumerate((self._serve, self._relieve, self._load_all, self._beat)):
            threading.Thread(target=self._run, args=(index, loop), name=loop.__name__, daemon=True).start()

    def _run(self, index: int, loop: Callable[[], None]) -> None:
        if index < THREADS:
            self._thread_ids[index] = threading.get_native_id()
        # A thread of this class does not take the CPU from the engine's thread when it is woken up (sched(7)).
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            loop()
        except (EOFError, OSError):
            _log.info("the step server ends with its connection")
        except Exception:  # a bug: the engine would wait for a worker that stays up without answering
            _log.exception("the step server ends")
        self._give_up()

    def _serve(self) -> None:
        """Body of the first thread."""
        while True:
            frame = buffer(receive_package(self._end))
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
                is_done = not self._slow and not self._quick and self._filling[FIRST] is None
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
            self._busy[LOADER] = IDLE
            with self._lock:
                grammar = self._grammars.setdefault(number, _Grammar())
                grammar.loaded = loaded
                if grammar.is_unloaded:
                    del self._grammars[number]
                for slot in [slot for slot in self._waiting if self._slots[slot].grammar is grammar]:
                    self._want(slot, self._slots[slot], self._waiting[slot])
            del grammar, loaded  # they would stay in memory until the next one comes
            self._news.set()

    def _load(self, number: int, fetch: Callable[[], Any]) -> CompiledGrammar | GuidedError:
        self._begin(LOADER, number + IMPORTING)
        try:
            with guard("loading a grammar"):
                result = self._read(fetch())
            with guard(result.backend):
                backend = self._backends[result.backend]
                self._begin(LOADER, number)
                return backend.load(result.constraint, result.dumped)
        except GuidedError as error:
            return from_wire(to_wire(error))  # without its traceback, which would keep the memory

    def _begin(self, thread: int, subject: int) -> None:
        self._since[thread] = now = time.monotonic()
        self._spent[thread, 0] = -1e-9 * now  # until the next heartbeat: none, and less for what began later
        self._spent[thread, 1] = 0.0
        self._busy[thread] = subject

    def _beat(self) -> None:
        """Body of the heartbeat. It publishes how long the other threads have been busy."""
        mark = self._table.mark
        mark["heart"] = threading.get_native_id()
        began, before = np.zeros(THREADS), np.zeros((THREADS, 2))
        """Since when each thread is busy, and its `thread_times` at the first heartbeat after that."""
        while True:
            is_busy = mark["busy"][0] != IDLE  # first: what begins after this has another `since`
            since = np.array(self._since)
            times = np.array(list(map(thread_times, self._thread_ids)))
            before = np.where((since != began)[:, None], times, before)
            began = since
            ran, waited = (times - before).T
            wall = time.monotonic() - since
            spent = np.column_stack((wall - waited, wall, ran)) * is_busy[:, None]
            still = since == self._since  # a thread that has begun with something else is measured next time
            mark["spent"][0, still] = spent[still]
            mark["beat"] += 1
            time.sleep(BEAT_SECONDS)

    def _is_stuck(self) -> bool:
        """Return whether the first thread is stuck in a row. With the lock, it then does not read from `end`."""
        return self._filling[FIRST] is not None and time.monotonic() - self._since[FIRST] > _STUCK_SECONDS

    def _fill_next(self, thread: int) -> bool:
        """Fill the next row that a thread may fill. Returns whether there was one."""
        with self._lock:
            last, self._filling[thread] = self._filling[thread], None
            if last is not None and (version := self._slots[last].freed) is not None:
                self._free(last, version)
            found = self._next(thread)
            if found is None:
                return False
            slot, wanted = found
            state = self._slots[slot]
            changes = state.changes
            if changes:
                state.changes = []
            self._filling[thread] = slot
            self._begin(thread, slot)
        self._fill(thread, slot, state, wanted, changes)
        return True

    def _next(self, thread: int) -> tuple[int, _Wanted] | None:
        """Choose the next row. Each thread avoids the grammar that the other one uses."""
        other = self._filling[1 - thread]
        if thread == FIRST:
            choices = [self._quick]
        elif other is None:  # quick rows that the first thread has left, because of their grammar
            choices = [self._slow, self._quick]
        elif self._is_stuck():
            while wait([self._end], 0):
                self._handle_frame(buffer(receive_package(self._end)))
            choices = [self._quick]
        else:
            choices = [self._slow]
        slots, avoided = self._slots, None if other is None else self._slots[other].grammar
        for rows in choices:
            able = (slot for slot in rows if slots[slot].grammar is not avoided)
            if rows is self._quick:
                slot = next(able, None)
            else:  # quicker ones first, but each one waits about as long as it takes, at most
                slot = min(able, key=lambda slot: slots[slot].wanted_at + slots[slot].seconds, default=None)
            if slot is not None:
                return slot, rows.pop(slot)
        return None

    def _handle_frame(self, frame: bytes | mmap) -> None:
        for request in self._decode(frame):
            self._handle(request)

    def _handle(self, request: Request) -> None:
        match request:
            case Fill():
                self._want_all(np.frombuffer(request.slots, np.int32))
            case Edit():
                state = self._slots[request.slot]
                state.changes.append(request)
                state.edit = request.version // EDIT
                self._want(request.slot, state, (request.version, -1))
            case Open():
                grammar = self._grammars.setdefault(request.grammar, _Grammar())
                state = _Slot(grammar, request.request_id, request.version // EDIT, grammar.seconds, 0.0, [request])
                self._slots[request.slot] = state
                self._want(request.slot, state, (request.version, -1))
            case Free():
                self._forget(request.slot)
                if request.slot in self._filling:
                    self._slots[request.slot].freed = request.version
                else:
                    self._free(request.slot, request.version)
            case Unload():
                for number in request.numbers:
                    grammar = self._grammars[number]
                    grammar.is_unloaded = True
                    if grammar.loaded is not None:
                        del self._grammars[number]

    def _want_all(self, slots: NDArray[np.int32]) -> None:
        table = self._table
        targets, tokens = table.target[slots].tolist(), table.tokens[slots].tolist()
        for slot, target, token in zip(slots.tolist(), targets, tokens, strict=True):
            state = self._slots.get(slot)
            if state is not None and target // EDIT == state.edit:  # if not, `Edit` or `Free` follows
                self._want(slot, state, (target, token))

    def _want(self, slot: int, state: _Slot, wanted: _Wanted) -> None:
        self._forget(slot)
        state.wanted_at = time.monotonic()
        if state.grammar.loaded is None:
            self._waiting[slot] = wanted
        elif state.seconds >= SLOW_SECONDS:
            self._slow[slot] = wanted
        else:
            self._quick[slot] = wanted

    def _forget(self, slot: int) -> None:
        for rows in (self._quick, self._slow, self._waiting):
            rows.pop(slot, None)

    def _free(self, slot: int, version: int) -> None:
        self._worker.free([slot])
        self._slots.pop(slot, None)
        self._table.status[slot] = OK
        self._table.ready[slot] = version

    def _fill(self, thread: int, slot: int, state: _Slot, wanted: _Wanted, changes: list[Open | Edit]) -> None:
        table, (target, token) = self._table, wanted
        started = self._since[thread]
        try:
            for change in changes:
                if isinstance(change, Open):
                    self._open(state.grammar.loaded, change)
                else:
                    self._worker.edit(slot, change.start, change.tokens)
            known, length = self._worker.length(slot), target & POSITION
            if length - known in (0, 1):
                error = self._worker.fill(slot, [token][: length - known], table.mask[slot])
            else:
                error = BackendError(f"the worker knows {known} output tokens of slot {slot}, not {length}")
        except GuidedError as raised:
            error = raised
        if error is None and self._forced_tokens:
            self._worker.look_ahead(slot, table.mask[slot], table.forced[slot])
        seconds = time.monotonic() - started
        state.seconds = self._seconds[slot] = seconds
        state.grammar.seconds = min(state.grammar.seconds, seconds)
        if error is None:
            status = STEERED if slot in self._worker.steered else OK
            vetoed = self._worker.vetoed.get(slot)
            if vetoed is not None:
                status |= CHECKED
                table.veto[slot] = vetoed.report()
            if status:
                table.status[slot] = status
            self._ready[slot] = target
        else:
            table.status[slot] = FAILED
            _log.warning("request %s (slot %d) failed: %s: %s", state.request_id, slot, error.code, error)
            self._send(encode(Failed(slot, target, to_wire(error))))
        self._busy[thread] = IDLE
        self._filled[0] += 1

    def _open(self, loaded: CompiledGrammar | GuidedError | None, opening: Open) -> None:
        assert loaded is not None
        if isinstance(loaded, GuidedError):
            raise loaded.with_traceback(None)
        self._worker.open(opening.slot, loaded, tokens=opening.tokens, budget=opening.budget, final=opening.final)

    def _wake_engine(self) -> None:
        if self._wake[0]:
            self._wake[0] = 0
            self._send(WAKE)

    def _send(self, answer: bytes) -> None:
        with self._sending:
            send_package(self._end, answer)
