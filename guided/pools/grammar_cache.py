"""Cache of compiled constraints: equal ones share one compilation, and its memory stays
within bounds.

An `InvalidConstraint` is cached too. A timeout or an internal error never is. A grammar
that leaves the cache stays with the requests that use it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.pools.protocol import Grammar

_LEAST_BYTES = 4096
"""Minimum size of an entry: a cached error takes memory too."""
DEFAULT_CACHE_BYTES = 64 << 20
_V = TypeVar("_V")


def cache_key(constraint: Constraint, backends: Sequence[str]) -> str:
    """Return a key that is equal for the same constraint and the same backends in the
    same order."""
    return ":".join((constraint.key, *backends))


class LeastRecentlyUsed(Generic[_V]):
    """Values with sizes in bytes, by key. While they have more than `max_bytes`, the
    least recently used one leaves.

    The newest one stays, whatever its size. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[_V, int]] = OrderedDict()
        self._total = 0

    def get(self, key: str) -> _V | None:
        """Return a value, which counts as used now, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def add(self, key: str, value: _V, nbytes: int) -> list[_V]:
        """Add a value with a new key. Returns those that leave."""
        self._values[key] = value, max(nbytes, _LEAST_BYTES)
        self._total += self._values[key][1]
        left: list[_V] = []
        while self._total > self._max_bytes and len(self._values) > 1:
            left.append(self.remove(next(iter(self._values))))
        return left

    def remove(self, key: str) -> _V:
        """Remove a value, and return it."""
        value, nbytes = self._values.pop(key)
        self._total -= nbytes
        return value


class GrammarCache:
    """The futures of compiled grammars. For any thread.

    Args:
        max_bytes: total size of the grammars and errors that are kept (see
            `LeastRecentlyUsed`).
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._pending: dict[str, Future[Grammar]] = {}
        self._done = LeastRecentlyUsed[Future[Grammar]](max_bytes)
        self.hits = 0
        """Number of constraints that were here, compiled."""
        self.shared = 0
        """Number of constraints that wait, or waited, for the compilation of an equal
        one."""
        self._lock = threading.RLock()  # to start one compilation may end another one

    @property
    def compiling(self) -> int:
        """Number of constraints that are being compiled, or wait for it."""
        return len(self._pending)

    def get(
        self,
        constraint: Constraint,
        backends: Sequence[str],
        start: Callable[[str], Future[Grammar]],
    ) -> Future[Grammar]:
        """Return the future of a grammar.

        Args:
            start: called with the key, if there is none: starts the compilation and
                returns its future.
        """
        key = cache_key(constraint, backends)
        with self._lock:
            if (future := self._done.get(key)) is not None:
                self.hits += 1
                return future
            if (future := self._pending.get(key)) is not None:
                self.shared += 1
                return future
            future = self._pending[key] = start(key)
        future.add_done_callback(partial(self._keep, key))
        return future

    def _keep(self, key: str, future: Future[Grammar]) -> None:
        """Move a future that is done, unless the same constraint may succeed next
        time."""
        error = future.exception()
        with self._lock:
            del self._pending[key]
            if error is None:
                self._done.add(key, future, future.result().nbytes)
            elif isinstance(error, InvalidConstraint):
                self._done.add(key, future, 0)
