"""ClientTurns: limits the requests of one client that are in progress while other clients are active."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

from engine.server.errors import QueueFull

_ACTIVE_SECONDS = 5.0
"""A client counts as active for this time after its last request."""
_LEAST_SECONDS = 0.5
"""Minimum time that a request keeps its place: starting a request costs time, even if it ends at once."""


class ClientTurns:
    """Lets requests in, those of each client in order. A single active client is not limited.

    While several clients are active, a client's requests beyond the limit wait at the gate. They cost little there: at
    most 64 KiB of each body are read. So a client with hundreds of requests delays those of another client by few.

    Args:
        limit: returns, for a number of active clients, the maximum number of requests of one client in progress.
        max_waiting: maximum number of requests of one client that wait.
    """

    def __init__(self, limit: Callable[[int], int], max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._inside: Counter[str] = Counter()
        """Requests in progress, by client."""
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._seen: dict[str, float] = {}
        """`time.monotonic()` when a client's last request began, or ended while the client was active. Oldest first."""
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None
        """Set while requests wait."""

    def enter(self, client: str, *, counts: bool = True) -> bool:
        """Let a request in and return True, or return False if it has to `wait`.

        Args:
            counts: the request makes its client active.
        """
        if counts:
            self._note(client)
        if client in self._queues or not self._has_place(client):
            return False
        self._inside[client] += 1
        return True

    async def wait(self, client: str) -> None:
        """Wait until a request is let in. Raises `QueueFull` if too many requests of the client wait."""
        if self.enter(client, counts=False):  # a place has become free since
            return
        queue = self._queues.setdefault(client, deque())
        if len(queue) >= self._max_waiting:
            raise QueueFull(f"{len(queue)} requests of this client wait for their turn: try again")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._look_later()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._drop(client, place)
            else:  # it was let in already
                self._free(client)
            raise

    def leave(self, client: str, began: float) -> None:
        """End the turn of a request that was let in at `began` (`time.monotonic()`)."""
        if client in self._seen:
            self._note(client)
        left = began + _LEAST_SECONDS - time.monotonic()
        if left > 0 and self._others(client) and not self._is_open:
            asyncio.get_running_loop().call_later(left, self._free, client)
        else:
            self._free(client)

    def _free(self, client: str) -> None:
        self._inside[client] -= 1
        if not self._inside[client]:
            del self._inside[client]
        self._let_in()

    def open(self) -> None:
        """Let all requests in from now on. The server is shutting down, and answers them at once."""
        self._is_open = True
        self._let_in()

    def _let_in(self) -> None:
        for client, queue in list(self._queues.items()):
            while queue and self._has_place(client):
                place = queue.popleft()
                if not place.cancelled():  # its task may not have run since
                    self._inside[client] += 1
                    place.set_result(None)
            if not queue:
                del self._queues[client]

    def _look_later(self) -> None:
        """Check again later: the other clients may become inactive while no request in progress ends."""
        if self._queues and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ACTIVE_SECONDS / 5, self._look)

    def _look(self) -> None:
        self._timer = None
        self._let_in()
        self._look_later()

    def _drop(self, client: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(client, deque())
        if place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[client]

    def _note(self, client: str) -> None:
        self._seen.pop(client, None)
        self._seen[client] = time.monotonic()

    def _has_place(self, client: str) -> bool:
        others = self._others(client)
        return self._is_open or not others or self._inside[client] < self._limit(others + 1)

    def has_others(self, client: str) -> bool:
        """Whether other clients are active, or have requests in progress."""
        return not self._is_open and (self._others(client) > 0 or not self._inside.keys() <= {client})

    def _others(self, client: str) -> int:
        """Return the number of other active clients."""
        oldest = time.monotonic() - _ACTIVE_SECONDS
        while self._seen and self._seen[first := next(iter(self._seen))] < oldest:
            del self._seen[first]
        return len(self._seen) - (client in self._seen)
