"""Verdict: what becomes of the sequences of an actor that is gone.

By default (`max_replays=0`) a death ends all that had a matcher there, and nobody else. A hang, or memory, ends the
one whose mask it was: the histories of the others are known, and they are opened elsewhere. With `max_replays` that
goes for deaths too, and who may have caused one is tried again, alone, so often.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.placed import Placed
from actors.supervision.supervisor import WorkerDown
from guided.errors import GuidedError, WorkerDied

__all__ = ["Verdict"]

_MOST_MOVES = 10
"""Actors that may end under a sequence that has no mask between: no fault of its own, but it ends some time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judges one end.

    Args:
        max_replays: how often a sequence is tried again after an actor ended with its row in its hands.
    """

    news: WorkerDown
    suspects: frozenset[int]
    """Whose row it may have been working on."""
    max_replays: int

    @classmethod
    def on(cls, news: WorkerDown, max_replays: int) -> Verdict:
        """Look at what the actor left: before its segment is dropped."""
        # One that was retired had nothing in its hands, whatever the mark says by now.
        suspects = frozenset() if news.cause == "retired" else frozenset(news.link.in_its_hands())
        return cls(news, suspects, max_replays)

    @property
    def certain(self) -> bool:
        """Whether it can have been nobody but the suspect."""
        return len(self.suspects) == 1 and not self.news.loading

    def is_lost(self, sequence: Placed) -> bool:
        """Whether it ends. If not, it is to be placed again; counts that, and notes whom to try alone."""
        suspected = sequence.opening.sequence in self.suspects
        if not sequence.sent:
            return False
        if self.news.cause == "died" and not self.max_replays and (sequence.confirmed or suspected):
            return True  # who never had an answer from there has lost nothing, if it wasn't its row
        if sequence.confirmed:
            sequence.moves = 0
        sequence.moves += 1
        if suspected:
            sequence.suspect = True
            sequence.deaths += self.certain
        return sequence.deaths > self.max_replays or sequence.moves > _MOST_MOVES

    def error(self, sequence: Placed) -> GuidedError:
        """What it ends with, if it does: the same request would end the next actor too, where it was its row."""
        error = self.news.error
        if isinstance(error, WorkerDied) and self.certain and sequence.opening.sequence in self.suspects:
            error = WorkerDied(f"{error.message} of this request's mask")
            error.retryable = False
        return error
