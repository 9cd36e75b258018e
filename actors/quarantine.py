"""Quarantine: constraints that have ended several mask actors are refused for a while."""

from __future__ import annotations

import time

from guided.errors import ConstraintQuarantined

_SECONDS = 600.0
_APART_SECONDS = 1.0
"""Ends that follow each other more closely count as one: something else may have ended several actors at once."""


class Quarantine:
    """Which constraints are refused, by their keys: those that have ended two actors within `_SECONDS`."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}
        """`time.monotonic()` of the ends of actors, by the key of the constraint."""
        self.total = 0
        """Number of constraints that were put into quarantine."""

    def note(self, key: str) -> None:
        """Note that a constraint has ended an actor. One actor may be ended by anything."""
        now = time.monotonic()
        ends = self._recent(key)
        if not ends or now - ends[-1] >= _APART_SECONDS:
            self._ends[key] = [*ends, now]
            self.total += len(ends) == 1

    def _recent(self, key: str) -> list[float]:
        since = time.monotonic() - _SECONDS
        return [end for end in self._ends.get(key, ()) if end > since]

    def keys(self) -> list[str]:
        """Return the keys of the constraints that are refused. From any thread."""
        return [key for key in list(self._ends) if len(self._recent(key)) > 1]

    def error(self, key: str) -> ConstraintQuarantined | None:
        """Return the error of a constraint that is refused, or None."""
        if len(self._recent(key)) < 2:
            return None
        why = "this constraint has ended 2 mask actors: it is refused for ten minutes"
        return ConstraintQuarantined(f"{why}; try a simpler one, or another backend")
