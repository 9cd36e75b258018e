"""Cache of compiled constraints: equal ones share one compilation, and their memory stays within bounds.

An `InvalidConstraint` is cached too. A timeout or an internal error never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidConstraint
from guided.pools.protocol import Grammar

CacheKey = tuple[str, ...]

_LEAST_BYTES = 4096
"""Minimum size of an entry: a cached error takes memory too."""

_LEAST_ENTRIES = 4
"""An unused grammar is kept if it takes at most a quarter of the cache (1 / `_LEAST_ENTRIES`). A quarter is always left
for unused grammars, even if the grammars in use fill the cache."""

DEFAULT_CACHE_BYTES = 64 << 20
"""Default size of the cache, in bytes. Unused grammars take the part that the grammars in use leave."""


def cache_key(constraint: Constraint, backends: Sequence[str]) -> CacheKey:
    """Return a key that is equal for the same constraint and the same backends in the same order."""
    return (constraint.key, *backends)


@dataclass(slots=True)
class Entry:
    """One constraint: its future grammar, its number of users, and its size."""

    future: Future[Grammar]
    users: int = 1
    nbytes: int = 0
    """0: not known yet."""
    refused: bool = False
    """The constraint is invalid, and its error is cached."""


class GrammarCache:
    """Reference-counted entries, bounded in bytes. Not thread-safe.

    Args:
        max_bytes: total size of grammars and cached errors. Unused grammars take the part that the grammars in use
            leave, at least a quarter; the least recently used ones are evicted. An unused grammar of more than a
            quarter is not kept: it would evict many others.
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[CacheKey, Entry] = {}
        self._unused: OrderedDict[CacheKey, None] = OrderedDict()
        """Entries without users, the least recently used first."""
        self._unused_bytes = 0
        self._used_bytes = 0
        """Size of the grammars in use."""
        self._keys: dict[str, set[CacheKey]] = {}
        """Cache keys of the entries with the same grammar, by `Grammar.key`."""

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
                self._used_bytes += entry.nbytes
            entry.users += 1
        return entry.future, False

    def admit(self, grammar: Grammar, nbytes: int) -> list[str]:
        """Count a compiled grammar of `nbytes` bytes, before its future is resolved. Returns the same as `release`."""
        entry = self._entries.get(grammar.cache_key)
        if entry is None or entry.nbytes:
            return []  # nothing to count, or counted before
        nbytes = max(nbytes, _LEAST_BYTES)
        entry.nbytes = nbytes
        self._used_bytes += nbytes
        self._keys.setdefault(grammar.key, set()).add(grammar.cache_key)
        return self._evict()

    def fail(self, key: CacheKey, error: GuidedError) -> list[str]:
        """Record that there is no grammar, before the future gets `error`. Returns the same as `release`."""
        entry = self._entries.get(key)
        if entry is None or entry.future.done():
            return []
        self._used_bytes -= entry.nbytes
        if not isinstance(error, InvalidConstraint):
            del self._entries[key]
            return []
        entry.users, entry.refused, entry.nbytes = 0, True, _LEAST_BYTES
        return self._keep_unused(key, entry)

    def release(self, grammar: Grammar) -> list[str]:
        """Remove a user. Returns the keys of evicted grammars, which workers no longer need."""
        entry = self._entries.get(grammar.cache_key)
        if entry is None or not entry.users:
            return []
        entry.users -= 1
        if entry.users:
            return []
        self._used_bytes -= entry.nbytes
        return self._keep_unused(grammar.cache_key, entry)

    def _keep_unused(self, key: CacheKey, entry: Entry) -> list[str]:
        if entry.nbytes > self._max_bytes // _LEAST_ENTRIES:
            return self._forget(key, self._entries.pop(key))
        self._unused[key] = None
        self._unused_bytes += entry.nbytes
        return self._evict()

    def _evict(self) -> list[str]:
        evicted: list[str] = []
        room = max(self._max_bytes - self._used_bytes, self._max_bytes // _LEAST_ENTRIES)
        while self._unused_bytes > room:
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
