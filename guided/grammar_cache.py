"""Which constraints are compiled or being compiled: equal ones share one compilation, unused ones stay within a bound.

Failures are remembered where they are the user's (`InvalidConstraint`); a timeout or a failure of ours never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidConstraint
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
    users: int = 1
    nbytes: int = _LEAST_BYTES
    refused: bool = False
    """It is invalid, and that is remembered."""


class GrammarCache:
    """Reference-counted, and bounded in bytes for what nobody uses: grammars and refusals. Used from one thread.

    Args:
        max_bytes: what unused grammars may weigh together; those in use are never evicted.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[CacheKey, Entry] = {}
        self._unused: OrderedDict[CacheKey, None] = OrderedDict()
        """Entries that nobody uses, longest unused first."""
        self._unused_bytes = 0
        self._keys: dict[str, set[CacheKey]] = {}
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, key: CacheKey) -> tuple[Future[Grammar], bool]:
        """The future under `key`, one user more; and whether it is new: then the caller has to see to it."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            entry = self._entries[key] = Entry(Future())
            return entry.future, True
        self.hits += 1
        if entry.refused:
            self._unused.move_to_end(key)
        else:
            self._take_up(key, entry)
            entry.users += 1
        return entry.future, False

    def weigh(self, grammar: Grammar, nbytes: int) -> None:
        """Say what a compiled grammar weighs, in bytes, before its future is resolved."""
        entry = self._entries.get(grammar.cache_key)
        if entry is not None:
            entry.nbytes = max(nbytes, _LEAST_BYTES)
            self._keys.setdefault(grammar.key, set()).add(grammar.cache_key)

    def fail(self, key: CacheKey, error: GuidedError) -> list[str]:
        """Say that there is no grammar, before the future is given `error`. Returns what `release` does."""
        entry = self._entries.get(key)
        if entry is None or entry.future.done():
            return []
        if not isinstance(error, InvalidConstraint):
            del self._entries[key]
            return []
        entry.users, entry.refused = 0, True
        return self._put_by(key, entry)

    def release(self, grammar: Grammar) -> list[str]:
        """One user less of `grammar`. Returns the keys of grammars evicted with it: no worker needs them any more."""
        entry = self._entries.get(grammar.cache_key)
        if entry is None or not entry.users:
            return []
        entry.users -= 1
        return self._put_by(grammar.cache_key, entry) if not entry.users else []

    def in_use(self) -> list[Grammar]:
        """The grammars that somebody uses."""
        users = (entry.future for entry in self._entries.values() if entry.users and entry.future.done())
        return [future.result() for future in users if future.exception() is None]

    def _take_up(self, key: CacheKey, entry: Entry) -> None:
        if key in self._unused:
            del self._unused[key]
            self._unused_bytes -= entry.nbytes

    def _put_by(self, key: CacheKey, entry: Entry) -> list[str]:
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
