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

_LEAST_BYTES = 4096
"""Minimum size of an entry: a cached error takes memory too."""
DEFAULT_CACHE_BYTES = 64 << 20


def cache_key(constraint: Constraint, backends: Sequence[str]) -> str:
    """Return a key that is equal for the same constraint and the same backends in the same order."""
    return ":".join((constraint.key, *backends))


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
        self._quarter = max_bytes // 4
        self._entries: dict[str, Entry] = {}
        self._unused: OrderedDict[str, Entry] = OrderedDict()
        """Entries without users, the least recently used first."""
        self._unused_bytes = 0
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, key: str) -> tuple[Future[Grammar], bool]:
        """Add a user. Returns the future and whether it is new: then the caller must resolve it."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(Future())
            return entry.future, True
        if entry.refused:
            self._unused.move_to_end(key)
            return entry.future, False
        if self._unused.pop(key, None) is not None:
            self._unused_bytes -= entry.nbytes
            self._used_bytes += entry.nbytes
        entry.users += 1
        return entry.future, False

    def admit(self, grammar: Grammar, nbytes: int) -> list[str]:
        """Count a compiled grammar of `nbytes` bytes, before its future is resolved. Returns the same as `release`."""
        entry = self._entries.get(grammar.key)
        if entry is None or entry.nbytes:
            return []  # nothing to count, or counted before
        entry.nbytes = max(nbytes, _LEAST_BYTES)
        self._used_bytes += entry.nbytes
        return self._evict()

    def fail(self, key: str, error: GuidedError) -> list[str]:
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
        entry = self._entries.get(grammar.key)
        if entry is None or not entry.users:
            return []
        entry.users -= 1
        if entry.users:
            return []
        self._used_bytes -= entry.nbytes
        return self._keep_unused(grammar.key, entry)

    def _keep_unused(self, key: str, entry: Entry) -> list[str]:
        if entry.nbytes > self._quarter:
            del self._entries[key]
            return [key]
        self._unused[key] = entry
        self._unused_bytes += entry.nbytes
        return self._evict()

    def _evict(self) -> list[str]:
        evicted: list[str] = []
        room = max(self._max_bytes - self._used_bytes, self._quarter)
        while self._unused_bytes > room:
            key, entry = self._unused.popitem(last=False)
            del self._entries[key]
            self._unused_bytes -= entry.nbytes
            evicted += [] if entry.refused else [key]
        return evicted
