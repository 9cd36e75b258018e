"""RemoteSteps: the actor's side of the step path, for an engine on another node.

The actor has a slot table of its own and the same `StepServer` as an actor beside the engine. A forwarder on the
engine's node (`actors/driver/forwarder.py`) makes two kinds of Ray calls: `deliver` hands over a frame of requests, and
`collect` waits for lines of the table that have changed. They are separate, so that a slow row does not delay frames.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.channel import WorkerEnd
from actors.steps.protocol import Answer, Failed, Segment
from actors.steps.server import StepServer
from guided.backends import Backends
from guided.worker import MaskWorker

_TOGETHER_SECONDS = 0.003
"""Lines that are ready wait so long for the other ones, and are sent without them after that."""
_REPORT_SECONDS = 0.25
"""While lines are missing, the engine hears this often which of them is being filled."""
_decode = Decoder(Answer).decode


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
        self, worker: MaskWorker, backends: Backends, slots: int, words: int, give_up: Callable[[], object]
    ) -> None:
        self._segment = Segment(slots, words)
        self._table = self._segment.table
        self._sent_ready, self._sent_mask = self._table.ready.copy(), np.zeros_like(self._table.mask)
        self._failed = np.zeros(slots, bool)
        """The slots of sequences that are over."""
        self._news = threading.Event()
        """Set while there may be lines to wait for."""
        ours, theirs = socket.socketpair()
        self._end, server_end = WorkerEnd(ours), WorkerEnd(theirs)

        def end() -> None:
            server_end.close()
            give_up()

        StepServer(worker, backends, server_end, self._table, end).start()

    def close(self) -> None:
        """End the server."""
        self._end.close()

    def deliver(self, frame: bytes, slots: bytes, target: bytes, tokens: bytes) -> None:
        """Take over a frame of requests. Frames are delivered one after the other, in order.

        Args:
            slots: int32 `[n]`: the slots that the requests name.
            target: int64 `[n]`: what `ready` becomes when the requests have been handled.
            tokens: int32 `[n, MAX_NEW_TOKENS]`.
        """
        named = np.frombuffer(slots, np.int32)
        self._table.tokens[named] = np.frombuffer(tokens, np.int32).reshape(len(named), -1)
        self._table.target[named] = np.frombuffer(target, np.int64)
        self._failed[named] = False
        self._news.set()
        self._end.send(frame)

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
            changed[_decode(frame).slot] = True
        return encode(self._lines(np.flatnonzero(changed).astype(np.int32), failures))

    def _failures(self, seconds: float) -> list[bytes]:
        """Wait for a message of the server, at most `seconds`. Return those about sequences that are over."""
        self._end.wait(seconds)
        found: list[bytes] = []
        while (frame := self._end.receive(wait=False)) is not None:
            answer = _decode(frame)
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
