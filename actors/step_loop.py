"""The step loop inside an actor: a request comes in, the worker fills rows, what is decided goes out.

A thread of its own, so that a step never waits for a call through Ray. Where memory is shared, a row that is ready is
marked so there: nobody sends, receives or decodes anything for it. Else it travels, and while the worker fills, a timer
sees to it that rows which are ready don't wait for a slow one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from actors.channel import End
from actors.segment import IDLE, Rows
from guided.messages import RowResult, RowStatus, StepAnswer, StepRequest, decoder, encode
from guided.worker import MaskWorker

__all__ = ["StepLoop"]

_FLUSH_SECONDS = 0.001
"""How old a result may get before it is sent without waiting for the step's other rows."""
_log = logging.getLogger(__name__)


class StepLoop:
    """Serves one incarnation's step messages until its connection is lost.

    Args:
        worker: owned by this loop's thread; grammars may be installed from others.
        end: connected to the engine; used by this loop's threads only.
        rows: the shared segment, or the actor's own memory where `shared` is False: then a row travels in its answer.
        give_up: called when this incarnation is over; ends the process.
    """

    def __init__(
        self,
        incarnation: int,
        worker: MaskWorker,
        end: End,
        rows: Rows,
        shared: bool,
        give_up: Callable[[], object],
    ) -> None:
        self._incarnation = incarnation
        self._worker = worker
        self._end = end
        self._rows = rows
        self._shared = shared
        self._give_up = give_up
        self._decode = decoder(StepRequest).decode
        self._lock = threading.Lock()
        self._number = 0
        self._results: list[RowResult] = []
        self._oldest = 0.0
        self._timer = None if shared else _Timer(_FLUSH_SECONDS)

    def start(self) -> None:
        """Serve, on daemon threads."""
        if self._timer is not None:
            threading.Thread(target=self._live, args=(self._flush_late,), name="mask-flush", daemon=True).start()
        threading.Thread(target=self._live, args=(self._serve,), name="mask-steps", daemon=True).start()

    def _live(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception:
            # The connection broke, or the worker raised, which it promises not to. An actor that stays without
            # answering would be waited for; its end is noticed.
            _log.exception("this incarnation is over")
            self._give_up()

    def _serve(self) -> None:
        # Waking up, it doesn't take the CPU from the engine's thread, which has just sent it something (sched(7)).
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            message = self._end.recv()
            try:
                request: StepRequest = self._decode(message)
            except msgspec.MsgspecError as error:
                _log.error("dropped a message of %d bytes that is no step request: %s", len(message), error)
                continue
            # What was handled once, or was overtaken, might write into rows that are somebody else's by now.
            if request.incarnation == self._incarnation and request.step > self._number and self._has_rows(request):
                self._handle(request)

    def _has_rows(self, request: StepRequest) -> bool:
        return all(0 <= fill.row < len(self._rows.masks) for fill in request.fills)

    def _handle(self, request: StepRequest) -> None:
        self._number = request.step
        self._worker.free(request.frees)  # without a mark: if that ends this process, it is nobody's row
        if self._timer is None:
            self._fill_in_place(request)
        else:
            self._timer.start()
            for result in self._worker.handle(request, self._rows.masks):
                self._add(result)
            self._timer.stop()
            with self._lock:
                self._flush()

    def _fill_in_place(self, request: StepRequest) -> None:
        """Rows that are ready are seen in the memory; the others are told at once."""
        number, rows = request.step, self._rows
        done, seconds, busy, since = rows.done, rows.seconds, rows.mark["busy"], rows.mark["since"]
        order = [fill.row for fill in request.fills]
        order.append(IDLE)
        since[0] = time.monotonic()
        busy[0] = order[0]
        for place, result in enumerate(self._worker.handle(request, rows.masks), 1):
            row = order[place - 1]
            if result.status is RowStatus.READY:
                seconds[row] = result.seconds
                done[row] = number
            since[0] = time.monotonic()
            busy[0] = order[place]
            if result.status is not RowStatus.READY:
                self._send([result])
        if rows.mark["wanted"][0]:
            rows.mark["wanted"][0] = 0
            self._send([])

    def _send(self, results: list[RowResult]) -> None:
        """Raises where the engine doesn't read, or is gone."""
        self._end.send(encode(StepAnswer(self._incarnation, self._number, results)))

    # where memory isn't shared

    def _add(self, result: RowResult) -> None:
        if result.status is RowStatus.READY:
            result = msgspec.structs.replace(result, mask=self._rows.masks[result.row].tobytes())
        now = time.perf_counter()
        with self._lock:
            if not self._results:
                self._oldest = now
            self._results.append(result)
            if now - self._oldest > _FLUSH_SECONDS:
                self._flush()

    def _flush(self) -> None:
        """Send what is decided; the lock is held."""
        if self._results:
            results, self._results = self._results, []
            self._send(results)

    def _flush_late(self) -> None:
        """Send for a step thread that is busy with a slow row (where the grammar library lets other threads run)."""
        assert self._timer is not None
        while True:
            self._timer.wait()
            with self._lock:
                self._flush()


class _Timer:
    """Ticks while it runs; a thread can wait for the ticks. Costs its owner a microsecond to start and to stop, and
    wakes nobody where it is stopped before the first tick.

    timerfd_create(2), which the standard library has from Python 3.13 on.
    """

    def __init__(self, seconds: float) -> None:
        # PyDLL keeps the GIL: the call takes less time than giving it away.
        libc = ctypes.PyDLL(None, use_errno=True)
        self._set = libc.timerfd_settime
        self._fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        nanoseconds = int(seconds * 1e9)
        # struct itimerspec: interval and first expiration, each in seconds and nanoseconds
        self._on = (ctypes.c_long * 4)(0, nanoseconds, 0, nanoseconds)
        self._off = (ctypes.c_long * 4)()

    def start(self) -> None:
        self._set(self._fd, 0, self._on, None)

    def stop(self) -> None:
        self._set(self._fd, 0, self._off, None)

    def wait(self) -> None:
        """Block until the next tick."""
        os.read(self._fd, 8)
