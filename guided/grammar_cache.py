"""Which constraints are compiled or being compiled: equal ones share one compilation, unused ones stay within a bound.

Failures are remembered where they are the user's (`InvalidConstraint`); a timeout or a failure of ours never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.pool import Grammar

__all__ = ["CacheKey", "Entry", "GrammarCache", "cache_key"]

CacheKey = tuple[str, ...]

_LEAST_BYTES = 4096
"""What an entry weighs at the least: a remembered refusal isn't free."""


def cache_key(constraint: Constraint, backends: Sequence[str]) -> CacheKey:
    """Equal where the same constraint is asked of the same backends in the same order."""
    return (constraint.key, *backends)


@dataclass(slots=True)
class Entry:
    """One constraint: its (coming) grammar, how many requests use it, and what it weighs."""

    future: Future[Grammar]
    users: int = 0
    nbytes: int = _LEAST_BYTES

    @property
    def idle(self) -> bool:
        """Nobody needs it: no user is left, or there is nothing to use."""
        return self.future.done() and (not self.users or self.future.exception() is not None)


class GrammarCache:
    """Reference-counted, and bounded in bytes for what nobody uses. Used from one thread.

    Args:
        max_bytes: what unused grammars may weigh together; those in use are never evicted.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[CacheKey, Entry] = OrderedDict()
        self._keys: dict[str, set[CacheKey]] = {}
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, key: CacheKey) -> tuple[Future[Grammar], bool]:
        """The future under `key`, one user more; and whether it is new: then the caller has to see to it."""
        entry = self._entries.get(key)
        if entry is not None and _forgettable(entry.future):
            del self._entries[key]
            entry = None
        new = entry is None
        if entry is None:
            entry = self._entries[key] = Entry(Future())
            self.misses += 1
        else:
            self.hits += 1
        entry.users += 1
        self._entries.move_to_end(key)
        return entry.future, new

    def weigh(self, grammar: Grammar, nbytes: int) -> None:
        """Say what a compiled grammar weighs, in bytes, before its future is resolved."""
        entry = self._entries.get(grammar.cache_key)
        if entry is not None:
            entry.nbytes = max(nbytes, _LEAST_BYTES)
            self._keys.setdefault(grammar.key, set()).add(grammar.cache_key)

    def release(self, grammar: Grammar) -> list[str]:
        """One user less of `grammar`. Returns the keys of grammars evicted with it: no worker needs them any more."""
        entry = self._entries.get(grammar.cache_key)
        if entry is None:
            return []
        entry.users = max(0, entry.users - 1)
        return self._evict()

    def in_use(self) -> list[Grammar]:
        """The grammars that somebody uses."""
        users = (entry.future for entry in self._entries.values() if entry.users and entry.future.done())
        return [future.result() for future in users if future.exception() is None]

    def _evict(self) -> list[str]:
        idle = [(key, entry) for key, entry in self._entries.items() if entry.idle]
        weight = sum(entry.nbytes for _, entry in idle)
        evicted: list[str] = []
        for key, entry in idle:
            if weight <= self._max_bytes:
                break
            weight -= entry.nbytes
            del self._entries[key]
            evicted.extend(self._forget(key, entry))
        return evicted

    def _forget(self, key: CacheKey, entry: Entry) -> list[str]:
        if entry.future.exception() is not None:
            return []
        name = entry.future.result().key
        holders = self._keys.get(name, set())
        holders.discard(key)
        if holders:
            return []
        self._keys.pop(name, None)
        return [name]


def _forgettable(future: Future[Grammar]) -> bool:
    if not future.done():
        return False
    error = future.exception()
    return error is not None and not isinstance(error, InvalidConstraint)
