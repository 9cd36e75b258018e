"""BytePairs: the encoding of tiktoken and tekken, in which a token's id is its rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import regex


class BytePairs:
    """Encodes text. Each piece that `pattern` finds is one token, or its bytes are merged: repeatedly, the two
    neighbours that form the token with the lowest id, until no two neighbours form a token.

    Args:
        ids: token ids by the tokens' bytes. Every single byte has one.
    """

    def __init__(self, pattern: str, ids: Mapping[bytes, int]) -> None:
        self._pattern, self._ids = regex.compile(pattern), ids

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens: list[int] = []
        for found in self._pattern.finditer(text):
            piece = found[0].encode("utf-8")
            token = self._ids.get(piece)
            tokens += self._merge(piece) if token is None else [token]
        return tokens

    def _merge(self, piece: bytes) -> list[int]:
        size, ids = len(piece), self._ids
        ends = list(range(1, size + 1))
        """End of the part that starts at each offset. 0: no part starts there any more."""
        previous = list(range(-1, size - 1))
        """Start of the part before the one that starts at each offset."""
        queue: list[tuple[int, int, int]] = []

        def propose(start: int, end: int) -> None:
            token = ids.get(piece[start:end])
            if token is not None:
                heapq.heappush(queue, (token, start, end))

        for start in range(size - 1):
            propose(start, start + 2)
        while queue:
            _, start, end = heapq.heappop(queue)
            middle = ends[start]
            if not middle or middle >= end or ends[middle] != end:
                continue  # one of the two was merged with another one
            ends[start], ends[middle] = end, 0
            if end < size:
                previous[end] = start
                propose(start, ends[end])
            if start:
                propose(previous[start], end)
        return [ids[piece[start:end]] for start, end in enumerate(ends) if end]
