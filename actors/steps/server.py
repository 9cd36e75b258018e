"""StepServer: the actor's side of the step channel. It handles requests and fills the slot table.

It runs on a thread of its own, so that a step never waits for a call through Ray.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.channel import WorkerEnd
from actors.steps.protocol import (
    EDIT,
    FAILED,
    IDLE,
    MAX_NEW_TOKENS,
    OK,
    POSITION,
    SLOW_SECONDS,
    STEERED,
    Answer,
    Failed,
    Fill,
    Filled,
    Free,
    Open,
    Request,
    SlotTable,
    freed,
    in_fill_order,
)
from guided.errors import BackendError, GuidedError, to_wire
from guided.worker import MaskWorker

_SEND_SECONDS = 0.001
"""Without shared memory: how long finished masks are held back, to be sent together with others of the step."""
_Wanted = tuple[int, list[int], bool]
"""Version of a mask, its new tokens, and whether to look ahead for forced ones."""
_log = logging.getLogger(__name__)


class StepServer:
    """Serves one incarnation's step channel until the connection is lost.

    Args:
        worker: used by this server's thread; grammars may be installed from other threads.
        end: connected to the engine.
        table: shared with the engine, or this process's own.
        shared: `table` is shared. If not, the server sends the lines that change.
        give_up: called when the connection is lost; ends the process.
    """

    def __init__(
        self, worker: MaskWorker, end: WorkerEnd, table: SlotTable, shared: bool, give_up: Callable[[], object]
    ) -> None:
        self._worker = worker
        self._end = end
        self._table = table
        self._give_up = give_up
        self._edits: dict[int, int] = {}
        """The edit count of each open slot."""
        self._request_ids: dict[int, str] = {}
        """The request of each open slot."""
        self._unfilled: dict[int, _Wanted] = {}
        """The requested masks, by slot, in the order in which they are computed."""
        self._since, self._busy, self._wake, self._seconds = (
            table.mark[name] for name in ("since", "busy", "wake", "seconds")
        )
        self._sender = None if shared else _LineSender(table, self._send)
        self._decode = Decoder(list[Request]).decode
        self._sending = threading.Lock()

    def start(self) -> None:
        """Serve, on daemon threads."""
        threading.Thread(target=self._run, args=(self._serve,), name="step-server", daemon=True).start()
        if self._sender is not None:
            threading.Thread(target=self._run, args=(self._sender.run,), name="line-sender", daemon=True).start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except ConnectionError as error:
            _log.info("the step server ends: %s", error)
            self._give_up()
        except Exception:  # a bug: the engine would wait for an actor that stays up without answering
            _log.exception("the step server ends")
            self._give_up()

    def _serve(self) -> None:
        # A thread of this class does not take the CPU from the engine's thread when it is woken up (sched(7)).
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            self._receive(wait=True)
            while self._unfilled:
                slot = next(iter(self._unfilled))
                if self._table.seconds[slot] > SLOW_SECONDS and self._receive(wait=False):
                    continue  # quicker rows may have been asked for meanwhile
                self._fill(slot, *self._unfilled.pop(slot))
            self._mark(IDLE)
            self._announce()

    def _receive(self, *, wait: bool) -> bool:
        """Handle the next frame. Returns whether there was one."""
        frame = self._end.receive(wait=wait)
        if frame is None:
            return False
        try:
            requests: list[Request] = self._decode(frame)
        except msgspec.MsgspecError as error:
            _log.error("dropped a frame of %d bytes that holds no requests: %s", len(frame), error)
            return True
        for request in requests:
            self._handle(request)
        if len(self._unfilled) > 1:
            slots = np.array(list(self._unfilled), np.int32)
            if (order := in_fill_order(slots, self._table)) is not slots:
                self._unfilled = {slot: self._unfilled[slot] for slot in order.tolist()}
        return True

    def _handle(self, request: Request) -> None:
        if isinstance(request, Fill):
            self._want(self._slots_to_fill(request), request.look_ahead)
        elif isinstance(request, Free):
            self._free(request.slots)
        else:
            self._edits[request.slot] = request.version // EDIT
            if isinstance(request, Open):
                self._request_ids[request.slot] = request.request_id
                self._table.seconds[request.slot] = request.seconds
                self._mark(request.slot)  # native code copies the parent's matcher: it may hang
                self._worker.open(request.slot, request.grammar, request.parent, request.tokens, request.budget)
            else:
                self._worker.edit(request.slot, request.start, request.tokens)
            slot = np.array([request.slot], np.int32)
            if self._sender is not None:
                self._table.target[slot] = request.version
            self._want(slot)

    def _slots_to_fill(self, request: Fill) -> NDArray[np.int32]:
        """Return the slots to fill; take over their columns if they came with the message."""
        slots = np.frombuffer(request.slots, np.int32)
        if self._sender is not None:
            self._table.target[slots] = np.frombuffer(request.target, np.int64)
            self._table.tokens[slots] = np.frombuffer(request.tokens, np.int32).reshape(-1, MAX_NEW_TOKENS)
        return slots

    def _want(self, slots: NDArray[np.int32], look_ahead: bool = False) -> None:
        """Note the masks that are to be computed."""
        table = self._table
        for slot, target, tokens in zip(
            slots.tolist(), table.target[slots].tolist(), table.tokens[slots].tolist(), strict=True
        ):
            if target // EDIT == self._edits.get(slot):  # if not, the engine has edited the output, and `Edit` follows
                self._unfilled[slot] = target, tokens, look_ahead

    def _fill(self, slot: int, target: int, tokens: list[int], look_ahead: bool) -> None:
        table = self._table
        started, cpu_started = time.monotonic(), time.thread_time()
        self._mark(slot, started)
        error = self._fill_slot(slot, target & POSITION, tokens)
        table.forced[slot] = -1
        if look_ahead and error is None:
            self._worker.look_ahead(slot, table.mask[slot], table.forced[slot])
        table.seconds[slot] = time.thread_time() - cpu_started
        self._seconds[0] += time.monotonic() - started
        if error is None:
            if slot in self._worker.steered:
                table.status[slot] = STEERED
            table.ready[slot] = target
            if self._sender is not None:
                self._sender.add(slot)
        else:
            table.status[slot] = FAILED
            _log.warning("request %s (slot %d) failed: %s: %s", self._request_ids[slot], slot, error.code, error)
            self._send(Failed(slot, target, to_wire(error)))

    def _announce(self) -> None:
        """Send what is left of a frame's lines, or wake the engine if it waits."""
        if self._sender is not None:
            self._sender.flush()
        elif self._wake[0]:
            self._wake[0] = 0
            self._send(Filled())

    def _fill_slot(self, slot: int, position: int, tokens: list[int]) -> GuidedError | None:
        new = position - self._worker.length(slot)
        if not 0 <= new <= MAX_NEW_TOKENS:
            return BackendError(f"the worker knows {position - new} output tokens of slot {slot}, not {position}")
        return self._worker.fill(slot, tokens[:new], self._table.mask[slot])

    def _free(self, slots: list[int]) -> None:
        self._worker.free(slots)
        for slot in slots:
            self._request_ids.pop(slot, None)
            self._unfilled.pop(slot, None)
        self._table.status[slots] = OK
        self._table.seconds[slots] = 0.0
        self._table.ready[slots] = [freed(EDIT * self._edits.pop(slot, 0)) for slot in slots]
        if self._sender is not None:
            for slot in slots:
                self._sender.add(slot)

    def _mark(self, slot: int, now: float | None = None) -> None:
        """Note which slot is being filled, and since when."""
        self._since[0] = time.monotonic() if now is None else now
        self._busy[0] = slot

    def _send(self, answer: Answer) -> None:
        """Send an answer. Raises if the engine does not read, or is gone."""
        with self._sending:
            self._end.send(encode(answer))


class _LineSender:
    """Sends changed lines of a table that is not shared: a few at a time, so that finished masks do not wait long for
    a slow one."""

    def __init__(self, table: SlotTable, send: Callable[[Answer], None]) -> None:
        self._table = table
        self._sent = np.zeros(table.mask.shape, np.int32)
        """The masks that the engine has."""
        self._send = send
        self._slots: list[int] = []
        self._oldest = 0.0
        self._lock = threading.Lock()
        self._pending = threading.Event()

    def add(self, slot: int) -> None:
        """Send a line that has changed, within about `_SEND_SECONDS`."""
        with self._lock:
            if not self._slots:
                self._oldest = time.monotonic()
                self._pending.set()
            self._slots.append(slot)
            if time.monotonic() - self._oldest > _SEND_SECONDS:
                self._flush()

    def flush(self) -> None:
        """Send what is waiting."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._pending.clear()
        if self._slots:
            slots, self._slots = np.array(self._slots, np.int32), []
            ready = self._table.ready[slots]
            filled = slots[ready >= 0]
            masks = self._table.mask[filled]
            changed = np.flatnonzero(masks != self._sent[filled]).astype(np.int32)
            self._sent[filled] = masks
            steered = slots[self._table.status[slots] == STEERED]
            self._send(
                Filled(
                    slots=slots.tobytes(),
                    ready=ready.tobytes(),
                    seconds=self._table.seconds[slots].tobytes(),
                    changed=changed.tobytes(),
                    mask=masks.reshape(-1)[changed].tobytes(),
                    forced=self._table.forced[slots].tobytes(),
                    steered=steered.tobytes(),
                    total=float(self._table.mark["seconds"][0]),
                )
            )

    def run(self) -> None:
        """Send while the server's thread is busy with a slow mask (if the grammar library releases the GIL)."""
        while True:
            self._pending.wait()
            time.sleep(_SEND_SECONDS)
            self.flush()
