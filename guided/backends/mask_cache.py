"""Cache of masks by automaton state, shared by all sequences of a grammar and bounded in bytes over all grammars.

It is for slow libraries, where computing a mask takes longer than copying one. A mask takes 16 KiB for 131,072 tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK_CACHE_BYTES = 64 << 20
"""The default bound: 4,096 masks of a vocabulary of 131,072 tokens."""


class MaskCache:
    """All cached masks of a process; the least recently used are evicted first.

    Not thread-safe, except that other threads may drop grammars.

    Args:
        limit: total size of the masks in bytes; 0 disables the cache.
    """

    def __init__(self, limit: int = MASK_CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[int, Hashable], tuple[NDArray[np.int32], Any]] = OrderedDict()
        self._numbers = itertools.count()
        self._deleted: deque[int] = deque()
        """Numbers of deleted grammars. Their masks are removed at the next `put`."""
        self.nbytes = 0
        """Current total size of the masks in bytes."""

    def of_grammar(self) -> GrammarMasks:
        """Return the masks of a new grammar. They are removed when the returned object is deleted."""
        number = next(self._numbers)
        masks = GrammarMasks(self, number)
        weakref.finalize(masks, self._deleted.append, number).atexit = False
        return masks

    def _get(self, grammar: int, key: Hashable) -> NDArray[np.int32] | None:
        entry = self._entries.get((grammar, key))
        if entry is None:
            return None
        self._entries.move_to_end((grammar, key))
        return entry[0]

    def _put(self, grammar: int, key: Hashable, mask: NDArray[np.int32], keeps: Any) -> None:
        self._remove_deleted()
        if mask.nbytes > self._limit or (grammar, key) in self._entries:
            return
        self._entries[grammar, key] = mask, keeps
        self.nbytes += mask.nbytes
        while self.nbytes > self._limit:
            _, (evicted, _) = self._entries.popitem(last=False)
            self.nbytes -= evicted.nbytes

    def _remove_deleted(self) -> None:
        deleted = {self._deleted.popleft() for _ in range(len(self._deleted))}
        for entry in [entry for entry in self._entries if entry[0] in deleted] if deleted else ():
            mask, _ = self._entries.pop(entry)
            self.nbytes -= mask.nbytes


class GrammarMasks:
    """The masks of one grammar within a `MaskCache`."""

    __slots__ = ("__weakref__", "_cache", "_number")

    def __init__(self, cache: MaskCache, number: int) -> None:
        self._cache = cache
        self._number = number

    def get(self, key: Hashable) -> NDArray[np.int32] | None:
        """Return the mask of a state, int32 `[words]`, read-only; None if it is not cached."""
        return self._cache._get(self._number, key)

    def put(self, key: Hashable, mask: NDArray[np.int32], keeps: Any = None) -> None:
        """Store a mask, which is read-only from now on.

        Args:
            keeps: object to keep alive with the mask, because its identity is part of `key`. It must not refer to this
                `GrammarMasks`.
        """
        self._cache._put(self._number, key, mask, keeps)
