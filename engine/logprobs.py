"""Log-probabilities of tokens, as results have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural, of the model's own distribution) and rank (1 is the most likely)."""

    logprob: float
    rank: int


class TokenLogprobs(Mapping[int, Logprob]):
    """The log-probabilities of a token and of its most likely alternatives, by token id. The token's own comes first.

    It keeps plain numbers, and makes a `Logprob` where one is asked for: an answer can have 40,000 of them, and a
    garbage collection, which stops all threads, visits every object.

    Args:
        ids, logprobs, ranks: of the token itself, then of its alternatives.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks")

    def __init__(self, ids: tuple[int, ...], logprobs: tuple[float, ...], ranks: tuple[int, ...]) -> None:
        self._ids, self._logprobs, self._ranks = ids, logprobs, ranks

    @property
    def own(self) -> float:
        """The log-probability of the token itself."""
        return self._logprobs[0]

    def rows(self) -> Iterator[tuple[int, float, int]]:
        """Return (token id, log-probability, rank) of each, in order."""
        return zip(self._ids, self._logprobs, self._ranks, strict=True)

    def __getitem__(self, token_id: int) -> Logprob:
        try:
            place = self._ids.index(token_id)
        except ValueError:
            raise KeyError(token_id) from None
        return Logprob(self._logprobs[place], self._ranks[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return repr(dict(self))
