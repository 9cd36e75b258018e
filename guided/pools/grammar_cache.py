"""Cache of compiled constraints: equal ones share one compilation, and its memory stays within bounds.

An `InvalidConstraint` is cached too. A timeout or an internal error never is. A grammar that leaves the cache stays
with the requests that use it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.pools.protocol import Grammar

_LEAST_BYTES = 4096
"""Minimum size of an entry: a cached error takes memory too."""
DEFAULT_CACHE_BYTES = 64 << 20


def cache_key(constraint: Constraint, backends: Sequence[str]) -> str:
    """Return a key that is equal for the same constraint and the same backends in the same order."""
    return ":".join((constraint.key, *backends))


class LeastRecentlyUsed:
    """Keys with sizes in bytes. While they have more than `max_bytes`, the least recently used one leaves.

    The newest one stays, whatever its size. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def use(self, key: str, nbytes: int) -> list[str]:
        """Add a key, or note that it is used again. Returns the keys that leave."""
        nbytes = max(nbytes, _LEAST_BYTES)
        self._total += nbytes - self._sizes.pop(key, 0)
        self._sizes[key] = nbytes
        left: list[str] = []
        while self._total > self._max_bytes and len(self._sizes) > 1:
            oldest, size = self._sizes.popitem(last=False)
            self._total -= size
            left.append(oldest)
        return left

    def discard(self, key: str) -> None:
        """Remove a key."""
        self._total -= self._sizes.pop(key, 0)


class GrammarCache:
    """The futures of compiled grammars. For any thread.

    Args:
        max_bytes: total size of the grammars and errors that are kept (see `LeastRecentlyUsed`).
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._futures: dict[str, Future[Grammar]] = {}
        self._kept = LeastRecentlyUsed(max_bytes)
        """Keys of the futures that are done."""
        self.hits = 0
        """Number of constraints that were here, compiled."""
        self.shared = 0
        """Number of constraints that wait, or waited, for the compilation of an equal one."""
        self._lock = threading.RLock()  # a future may be done when its callback is added

    @property
    def compiling(self) -> int:
        """Number of constraints that are being compiled, or wait for it."""
        with self._lock:
            return sum(not future.done() for future in self._futures.values())

    def get(
        self, constraint: Constraint, backends: Sequence[str], start: Callable[[str], Future[Grammar]]
    ) -> Future[Grammar]:
        """Return the future of a grammar.

        Args:
            start: called with the key, if there is none: starts the compilation and returns its future.
        """
        key = cache_key(constraint, backends)
        with self._lock:
            if (known := self._futures.get(key)) is not None and known.done():
                self._use(key, known)
            if key not in self._futures:
                self._futures[key] = future = start(key)
                future.add_done_callback(partial(self._use, key))
                return future
            self.hits += self._futures[key].done()
            self.shared += not self._futures[key].done()
            return self._futures[key]

    def _use(self, key: str, future: Future[Grammar]) -> None:
        """Note that a future is done, or used again. Forgets it if the same constraint may succeed next time."""
        error = future.exception()
        with self._lock:
            if self._futures.get(key) is not future:
                return
            if error is not None and not isinstance(error, InvalidConstraint):
                del self._futures[key]
                return
            for left in self._kept.use(key, 0 if error is not None else future.result().nbytes):
                del self._futures[left]
