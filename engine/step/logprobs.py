"""Log-probabilities of tokens, as results have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural, of the model's own distribution) and rank
    (1 is the most likely)."""

    logprob: float
    rank: int


class TokenLogprobs(Mapping[int, Logprob]):
    """The log-probabilities of a token and of its most likely alternatives, by token
    id. The token's own comes first.

    It keeps plain numbers, and makes a `Logprob` where one is asked for: an answer can
    have 40,000 of them, and a garbage collection, which stops all threads, visits every
    object.

    Args:
        rows: (token id, log-probability, rank) of the token itself, then of its
            alternatives.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks")

    def __init__(self, rows: list[tuple[int, float, int]]) -> None:
        columns: Any = zip(*rows, strict=True)
        self._ids: tuple[int, ...]
        self._logprobs: tuple[float, ...]
        self._ids, self._logprobs, self._ranks = columns

    @property
    def own(self) -> float:
        """The log-probability of the token itself."""
        return self._logprobs[0]

    def rows(self) -> Iterator[tuple[int, float, int]]:
        """Return (token id, log-probability, rank) of each, in order."""
        return zip(self._ids, self._logprobs, self._ranks, strict=True)

    def __getitem__(self, token_id: int) -> Logprob:
        for token, logprob, rank in self.rows():
            if token == token_id:
                return Logprob(logprob, rank)
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return repr(dict(self))


def ranked_logprobs(
    logprobs: Tensor, tokens: Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    """Return the token of each row and its `counts[row]` most likely, from `logprobs`,
    float32 `[rows, vocab]`."""
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    ranked: list[TokenLogprobs] = []
    columns = (
        tokens.tolist(),
        chosen[:, 0].tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
    )
    for count, token, value, rank, ids, values in zip(counts, *columns, strict=True):
        entries = [(token, value, rank)]
        for place in range(min(count, len(ids))):
            # the mask may leave fewer
            if ids[place] != token and values[place] > -math.inf:
                entries.append((ids[place], values[place], place + 1))
        ranked.append(TokenLogprobs(entries))
    return ranked
