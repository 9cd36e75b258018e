"""CompileTurns: limits how many constraints of one client are in the pool's compile queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from engine.sequence import SequenceGroup

_MAX_PER_CLIENT = 64
"""A quarter of the pool's queue (`RayPoolOptions.max_compiling`)."""


class CompileTurns:
    """Lets a limited number of groups of each client into the pool's compile queue. The others wait here, in order.

    So a client with many slow constraints leaves room for those of other clients.
    """

    def __init__(self, limit: int = _MAX_PER_CLIENT) -> None:
        self._limit = limit
        self._inside: set[SequenceGroup] = set()
        self._counts: Counter[str] = Counter()
        """Groups inside, by client."""
        self._queues: dict[str, deque[SequenceGroup]] = {}

    def enter(self, group: SequenceGroup) -> bool:
        """Let a group in, or queue it. Returns whether it is in."""
        queue = self._queues.get(group.client)
        if queue or not self._has_room(group.client):
            self._queues.setdefault(group.client, deque()).append(group)
            return False
        self._let_in(group)
        return True

    def leave(self, group: SequenceGroup) -> None:
        """Note that the pool has a result for a group's constraint. Idempotent."""
        if group in self._inside:
            self._inside.remove(group)
            self._counts[group.client] -= 1
            if not self._counts[group.client]:
                del self._counts[group.client]

    def cancel(self, group: SequenceGroup) -> None:
        """Take a group that has ended out of its queue. One inside stays there: the pool goes on compiling."""
        queue = self._queues.get(group.client, deque())
        if group in queue:
            queue.remove(group)

    @property
    def has_next(self) -> bool:
        """Whether a queued group could enter."""
        return any(queue and self._has_room(client) for client, queue in self._queues.items())

    def next(self) -> Iterator[SequenceGroup]:
        """Let queued groups in, and yield them."""
        for client, queue in list(self._queues.items()):
            while queue and self._has_room(client):
                group = queue.popleft()
                self._let_in(group)
                yield group
            if not queue:
                del self._queues[client]

    def _has_room(self, client: str) -> bool:
        return self._counts[client] < self._limit

    def _let_in(self, group: SequenceGroup) -> None:
        self._inside.add(group)
        self._counts[group.client] += 1
