"""Masks of states that may come again, shared by all sequences of a grammar: one bound in bytes over all grammars.

For the slow libraries, whose masks take longer than copying one. Rows that write the same schema go through the same
states: keys, quotes, commas, the inside of strings. A mask is kept packed, 16 KiB for 131,072 tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK_CACHE_BYTES", "GrammarMasks", "MaskCache"]

MASK_CACHE_BYTES = 64 << 20
"""The bound where none is given: 4,096 masks of a vocabulary of 131,072 tokens."""


class MaskCache:
    """The masks that a process keeps; the least recently used are given up first. Not for several threads at a time,
    though grammars may be dropped by others.

    Args:
        limit: bytes that all masks may come to; 0 keeps none.
    """

    def __init__(self, limit: int = MASK_CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[int, Hashable], tuple[NDArray[np.int32], Any]] = OrderedDict()
        self._keys: dict[int, set[Hashable]] = {}
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        """Grammars that are gone: noted by whoever let go of the last reference, cleared away here."""
        self.nbytes = 0
        """Bytes that the masks come to now."""

    def of_grammar(self) -> GrammarMasks:
        """A grammar's part. Its masks go with it."""
        number = next(self._numbers)
        masks = GrammarMasks(self, number)
        weakref.finalize(masks, self._dropped.append, number).atexit = False
        return masks

    def _get(self, grammar: int, key: Hashable) -> NDArray[np.int32] | None:
        entry = self._entries.get((grammar, key))
        if entry is None:
            return None
        self._entries.move_to_end((grammar, key))
        return entry[0]

    def _put(self, grammar: int, key: Hashable, mask: NDArray[np.int32], keeps: Any) -> None:
        self._clear_dropped()
        if mask.nbytes > self._limit or (grammar, key) in self._entries:
            return
        self._entries[grammar, key] = mask, keeps
        self._keys.setdefault(grammar, set()).add(key)
        self.nbytes += mask.nbytes
        while self.nbytes > self._limit:
            (owner, oldest), (evicted, _) = self._entries.popitem(last=False)
            self.nbytes -= evicted.nbytes
            self._keys[owner].discard(oldest)

    def _clear_dropped(self) -> None:
        while self._dropped:
            number = self._dropped.popleft()
            for key in self._keys.pop(number, ()):
                mask, _ = self._entries.pop((number, key))
                self.nbytes -= mask.nbytes


class GrammarMasks:
    """One grammar's masks within a `MaskCache`."""

    __slots__ = ("__weakref__", "_cache", "_number")

    def __init__(self, cache: MaskCache, number: int) -> None:
        self._cache = cache
        self._number = number

    def get(self, key: Hashable) -> NDArray[np.int32] | None:
        """The mask, int32 `[words]`, not to be written to; None where it isn't kept."""
        return self._cache._get(self._number, key)

    def put(self, key: Hashable, mask: NDArray[np.int32], keeps: Any = None) -> None:
        """Keep a mask, which nobody writes to from now on.

        Args:
            keeps: what has to live as long: that whose identity is part of `key`. It must not lead back to this.
        """
        self._cache._put(self._number, key, mask, keeps)
