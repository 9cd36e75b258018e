"""The step path to an actor on another node, by Ray calls. For the engine each worker is local.

`RemoteSteps`, in the actor, has a slot table of its own and the same `StepServer` as an actor beside the engine.
`forward`, in the driver's process on the engine's node, is the worker's side of the engine's table and channel. It
makes two kinds of Ray calls: `deliver` hands over a frame of requests, and `collect` waits for lines of the table that
have changed. They are separate, so that a slow row does not delay frames. Ray's own authentication and TLS protect what
travels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.protocol import (
    IDLE,
    UNKNOWN,
    Answer,
    Failed,
    Fill,
    Filled,
    Load,
    Request,
    Segment,
    SlotTable,
    Unload,
    hang_up,
)
from actors.server import StepServer
from guided.backends import Backends
from guided.worker import MaskWorker

_TOGETHER_SECONDS = 0.003
"""Lines that are ready wait so long for the other ones, and are sent without them after that."""
_REPORT_SECONDS = 0.25
"""While lines are missing, the engine hears this often which of them is being filled."""
_FILLED = encode(Filled())
_decode_answer = Decoder(Answer).decode
_decode_requests = Decoder(list[Request]).decode
_log = logging.getLogger(__name__)


class Lines(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Lines of a slot table that have changed. Arrays are bytes in native order, with the types of `SlotTable`."""

    slots: bytes
    """int32 `[n]`."""
    ready: bytes
    seconds: bytes
    status: bytes
    forced: bytes
    changed: bytes
    """int32 `[m]`: positions of the words that differ from those sent before, in the flattened masks `[n, words]`."""
    mask: bytes
    """int32 `[m]`: the words there."""
    mark: bytes
    """The worker's mark. `since` is the number of seconds that have passed since then."""
    failures: list[bytes]
    """Frames with a `Failed` each."""


class RemoteSteps:
    """Serves the steps of an engine on another node.

    Args:
        worker: used by the server's threads.
        give_up: called when the server ends; ends the process.
    """

    def __init__(
        self,
        worker: MaskWorker,
        backends: Backends,
        slots: int,
        words: int,
        forced_tokens: bool,
        give_up: Callable[[], object],
    ) -> None:
        self._segment = Segment(slots, words)
        self._table = self._segment.table
        self._sent_ready, self._sent_mask = self._table.ready.copy(), np.zeros_like(self._table.mask)
        self._failed = np.zeros(slots, bool)
        """The slots of sequences that are over."""
        self._news = threading.Event()
        """Set while there may be lines to wait for."""
        self._end, server_end = Pipe()

        def end() -> None:
            hang_up(server_end)
            give_up()

        StepServer(worker, backends, server_end, self._table, forced_tokens, end).start()

    def close(self) -> None:
        """End the server."""
        hang_up(self._end)

    def deliver(self, frame: bytes, slots: bytes, target: bytes, tokens: bytes) -> None:
        """Take over a frame of requests. Frames are delivered one after the other, in order.

        Args:
            slots: int32 `[n]`: the slots that the requests name.
            target: int64 `[n]`: what `ready` becomes when the requests have been handled.
            tokens: int32 `[n]`.
        """
        named = np.frombuffer(slots, np.int32)
        self._table.tokens[named] = np.frombuffer(tokens, np.int32)
        self._table.target[named] = np.frombuffer(target, np.int64)
        self._failed[named] = False
        self._news.set()
        self._end.send_bytes(frame)

    def collect(self) -> bytes:
        """Wait for changed lines, and return encoded `Lines`. One call at a time.

        Lines that are ready wait for the others of their step, at most a few milliseconds.
        """
        table, failures = self._table, list[bytes]()
        self._news.wait()
        deadline, has_waited = time.monotonic() + _REPORT_SECONDS, False
        while True:
            self._news.clear()
            table.mark["wake"] = 1  # the server sends a message when it has nothing left to fill
            changed = table.ready != self._sent_ready
            is_complete = bool((self._failed | (table.ready == table.target)).all())
            if is_complete or (has_waited and (changed.any() or failures)) or time.monotonic() > deadline:
                break
            has_waited = bool(changed.any())
            failures += self._failures(_TOGETHER_SECONDS)
        if not is_complete:
            self._news.set()
        for frame in failures:
            changed[_decode_answer(frame).slot] = True
        return encode(self._lines(np.flatnonzero(changed).astype(np.int32), failures))

    def _failures(self, seconds: float) -> list[bytes]:
        """Wait for a message of the server, at most `seconds`. Return those about sequences that are over."""
        self._end.poll(seconds)
        found: list[bytes] = []
        while self._end.poll(0):
            frame = self._end.recv_bytes()
            answer = _decode_answer(frame)
            if isinstance(answer, Failed):
                self._failed[answer.slot] = True
                found.append(frame)
        return found

    def _lines(self, slots: NDArray[np.int32], failures: list[bytes]) -> Lines:
        table = self._table
        ready = table.ready[slots]  # before the masks: a line that is filled again meanwhile has the older version
        masks = table.mask[slots]
        words = np.flatnonzero(masks != self._sent_mask[slots]).astype(np.int32)
        self._sent_ready[slots], self._sent_mask[slots] = ready, masks
        mark = table.mark.copy()
        mark["since"] = time.monotonic() - mark["since"]
        return Lines(
            slots=slots.tobytes(),
            ready=ready.tobytes(),
            seconds=table.seconds[slots].tobytes(),
            status=table.status[slots].tobytes(),
            forced=table.forced[slots].tobytes(),
            changed=words.tobytes(),
            mask=masks.reshape(-1)[words].tobytes(),
            mark=mark.tobytes(),
            failures=failures,
        )


def forward(
    end: Connection[Any, Any],
    table: SlotTable,
    deliver: Callable[[bytes, bytes, bytes, bytes], object],
    collect: Callable[[], bytes],
) -> None:
    """Forward one incarnation's steps, on two daemon threads, until the engine closes the channel or the actor ends.

    Args:
        end: the worker's end of the channel.
        table: shared with the engine.
        deliver: calls `RemoteSteps.deliver` in the actor, and does not wait for it. Calls keep their order.
        collect: calls `RemoteSteps.collect` in the actor. Raises if the actor has ended.
    """

    def forward_frame() -> None:
        frame = end.recv_bytes()
        slots = np.concatenate([_slots(each) for each in _decode_requests(frame)])
        if table.mark["busy"][0, 0] == IDLE:  # until the actor says which slot it is
            table.mark["since"][0, 0] = time.monotonic()
            table.mark["busy"][0, 0] = UNKNOWN
        deliver(frame, slots.tobytes(), table.target[slots].tobytes(), table.tokens[slots].tobytes())

    def return_lines() -> None:
        lines = msgspec.msgpack.decode(collect(), type=Lines)
        _write(lines, table)
        for failed in lines.failures:
            end.send_bytes(failed)
        if table.mark["wake"][0]:
            table.mark["wake"] = 0
            end.send_bytes(_FILLED)

    def run(action: Callable[[], None]) -> None:
        try:
            while True:
                action()
        except Exception as error:  # of any kind: the engine would wait for a worker that does not answer
            _log.info("a step channel ends: %s", error)
        hang_up(end)

    for action in (forward_frame, return_lines):
        threading.Thread(target=run, args=(action,), name="forwarder", daemon=True).start()


def _write(lines: Lines, table: SlotTable) -> None:
    """Write lines into the table: `ready` last, because the engine reads a line when its `ready` has changed."""
    slots = np.frombuffer(lines.slots, np.int32)
    masks = table.mask[slots]
    masks.reshape(-1)[np.frombuffer(lines.changed, np.int32)] = np.frombuffer(lines.mask, np.int32)
    table.mask[slots] = masks
    table.seconds[slots] = np.frombuffer(lines.seconds, np.float32)
    table.status[slots] = np.frombuffer(lines.status, np.int32)
    table.forced[slots] = np.frombuffer(lines.forced, np.int32).reshape(len(slots), -1)
    table.ready[slots] = np.frombuffer(lines.ready, np.int64)
    mark = np.frombuffer(lines.mark, table.mark.dtype)
    table.mark["since"] = time.monotonic() - mark["since"]
    table.mark["busy"], table.mark["filled"] = mark["busy"], mark["filled"]


def _slots(request: Request) -> NDArray[np.int32]:
    """Return the slots that a request names, int32 `[n]`."""
    if isinstance(request, Fill):
        return np.frombuffer(request.slots, np.int32)
    return np.array([] if isinstance(request, Load | Unload) else [request.slot], np.int32)
