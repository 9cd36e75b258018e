"""Cache of compiled constraints: equal ones share one compilation, and unused ones stay within a bound.

An `InvalidConstraint` is cached too. A timeout or an internal error never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidConstraint
from guided.pool import Grammar

CacheKey = tuple[str, ...]

_LEAST_BYTES = 4096
"""Minimum size of an entry: a cached error takes memory too."""

_LEAST_ENTRIES = 4
"""Minimum number of the largest unused grammars that fit into the cache."""

DEFAULT_CACHE_BYTES = 128 << 20
"""Memory for compiled grammars that no request uses, by default."""


def cache_key(constraint: Constraint, backends: Sequence[str]) -> CacheKey:
    """Return a key that is equal for the same constraint and the same backends in the same order."""
    return (constraint.key, *backends)


@dataclass(slots=True)
class Entry:
    """One constraint: its future grammar, its number of users, and its size."""

    future: Future[Grammar]
    users: int = 1
    nbytes: int = _LEAST_BYTES
    refused: bool = False
    """The constraint is invalid, and its error is cached."""


class GrammarCache:
    """Reference-counted entries; unused grammars and cached errors are bounded in bytes. Not thread-safe.

    Args:
        max_bytes: total size of unused grammars; those in use are never evicted. One that takes more than a quarter of
            it is not kept: it would evict many others.
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[CacheKey, Entry] = {}
        self._unused: OrderedDict[CacheKey, None] = OrderedDict()
        """Entries without users, the longest unused first."""
        self._unused_bytes = 0
        self._keys: dict[str, set[CacheKey]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, key: CacheKey) -> tuple[Future[Grammar], bool]:
        """Add a user. Returns the future and whether it is new: then the caller must resolve it."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(Future())
            return entry.future, True
        if entry.refused:
            self._unused.move_to_end(key)
        else:
            if key in self._unused:
                del self._unused[key]
                self._unused_bytes -= entry.nbytes
            entry.users += 1
        return entry.future, False

    def weigh(self, grammar: Grammar, nbytes: int) -> None:
        """Set the size of a compiled grammar in bytes, before its future is resolved."""
        entry = self._entries.get(grammar.cache_key)
        if entry is not None:
            entry.nbytes = max(nbytes, _LEAST_BYTES)
            self._keys.setdefault(grammar.key, set()).add(grammar.cache_key)

    def fail(self, key: CacheKey, error: GuidedError) -> list[str]:
        """Record that compilation failed, before the future gets `error`. Returns the same as `release`."""
        entry = self._entries.get(key)
        if entry is None or entry.future.done():
            return []
        if not isinstance(error, InvalidConstraint):
            del self._entries[key]
            return []
        entry.users, entry.refused = 0, True
        return self._put_by(key, entry)

    def release(self, grammar: Grammar) -> list[str]:
        """Remove a user. Returns the keys of evicted grammars, which workers no longer need."""
        entry = self._entries.get(grammar.cache_key)
        if entry is None or not entry.users:
            return []
        entry.users -= 1
        return self._put_by(grammar.cache_key, entry) if not entry.users else []

    def in_use(self) -> list[Grammar]:
        """Return the grammars that have users."""
        users = (entry.future for entry in self._entries.values() if entry.users and entry.future.done())
        return [future.result() for future in users if future.exception() is None]

    def _put_by(self, key: CacheKey, entry: Entry) -> list[str]:
        if entry.nbytes > self._max_bytes // _LEAST_ENTRIES:
            return self._forget(key, self._entries.pop(key))
        self._unused[key] = None
        self._unused_bytes += entry.nbytes
        evicted: list[str] = []
        while self._unused_bytes > self._max_bytes:
            oldest, _ = self._unused.popitem(last=False)
            gone = self._entries.pop(oldest)
            self._unused_bytes -= gone.nbytes
            evicted.extend(self._forget(oldest, gone))
        return evicted

    def _forget(self, key: CacheKey, entry: Entry) -> list[str]:
        if entry.refused:
            return []
        name = entry.future.result().key
        holders = self._keys.get(name, set())
        holders.discard(key)
        if holders:
            return []
        self._keys.pop(name, None)
        return [name]
