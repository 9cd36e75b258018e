"""Forwarder: connects an actor on another node to the engine, by Ray calls. Runs in the driver's process.

For the engine each worker is local: a slot table in shared memory, and a Unix socket. For an actor on another node the
forwarder is the worker's side of both. It hands frames over to `RemoteSteps` in the actor, and writes the lines that
come back into the table. Ray's own authentication and TLS protect what travels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.channel import WorkerEnd
from actors.steps.protocol import IDLE, UNKNOWN, Fill, Filled, Load, Request, SlotTable, Unload
from actors.steps.remote import Lines

_FILLED = encode(Filled())
_decode_requests = Decoder(list[Request]).decode
_decode_lines = Decoder(Lines).decode
_log = logging.getLogger(__name__)


class Forwarder:
    """Forwards one incarnation's step channel until the engine closes it, or the actor ends.

    Args:
        end: the worker's end of the channel.
        table: shared with the engine.
        deliver: calls `RemoteSteps.deliver` in the actor, and does not wait for it. Calls keep their order.
        collect: calls `RemoteSteps.collect` in the actor. Raises if the actor has ended.
    """

    def __init__(
        self,
        end: WorkerEnd,
        table: SlotTable,
        deliver: Callable[[bytes, bytes, bytes, bytes], object],
        collect: Callable[[], bytes],
    ) -> None:
        self._end = end
        self._table = table
        self._deliver = deliver
        self._collect = collect

    def start(self) -> None:
        """Forward, on two daemon threads."""
        for loop in (self._forward_frames, self._return_lines):
            threading.Thread(target=self._run, args=(loop,), name="forwarder", daemon=True).start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # of any kind: the engine would wait for a worker that does not answer
            _log.info("a step channel ends: %s", error)
        self._end.close()

    def _forward_frames(self) -> None:
        table = self._table
        while (frame := self._end.receive()) is not None:
            requests = _decode_requests(frame)
            slots = np.concatenate([_slots(each) for each in requests])
            if table.mark["busy"][0, 0] == IDLE:  # until the actor says which slot it is
                table.mark["since"][0, 0] = time.monotonic()
                table.mark["busy"][0, 0] = UNKNOWN
            self._deliver(frame, slots.tobytes(), table.target[slots].tobytes(), table.tokens[slots].tobytes())

    def _return_lines(self) -> None:
        while True:
            lines = _decode_lines(self._collect())
            self._write(lines)
            for frame in lines.failures:
                self._end.send(frame)
            if self._table.mark["wake"][0]:
                self._table.mark["wake"] = 0
                self._end.send(_FILLED)

    def _write(self, lines: Lines) -> None:
        """Write lines into the table: `ready` last, because the engine reads a line when its `ready` has changed."""
        table, slots = self._table, np.frombuffer(lines.slots, np.int32)
        masks = table.mask[slots]
        masks.reshape(-1)[np.frombuffer(lines.changed, np.int32)] = np.frombuffer(lines.mask, np.int32)
        table.mask[slots] = masks
        table.seconds[slots] = np.frombuffer(lines.seconds, np.float32)
        table.status[slots] = np.frombuffer(lines.status, np.int32)
        table.forced[slots] = np.frombuffer(lines.forced, np.int32).reshape(len(slots), -1)
        table.ready[slots] = np.frombuffer(lines.ready, np.int64)
        mark = np.frombuffer(lines.mark, table.mark.dtype)
        table.mark["since"] = time.monotonic() - mark["since"]
        for name in ("busy", "seconds", "filled"):
            table.mark[name] = mark[name]


def _slots(request: Request) -> NDArray[np.int32]:
    """Return the slots that a request names, int32 `[n]`."""
    if isinstance(request, Fill):
        return np.frombuffer(request.slots, np.int32)
    return np.array([] if isinstance(request, Load | Unload) else [request.slot], np.int32)
