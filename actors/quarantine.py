"""Quarantine: constraints that have ended several mask actors are refused for a while."""

from __future__ import annotations

import time

from guided.errors import ConstraintQuarantined

_ENDS = 2
"""So many ends: one actor may be ended by anything."""
_SECONDS = 600.0


class Quarantine:
    """Which constraints are refused, by their keys. For any thread."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}
        """`time.monotonic()` of the ends of actors in the last ten minutes."""
        self.total = 0
        """Number of constraints that were put into quarantine."""

    def note(self, key: str) -> None:
        """Note that a constraint has ended an actor."""
        self._ends[key] = [*self._recent(key), time.monotonic()]
        self.total += len(self._ends[key]) == _ENDS

    def keys(self) -> list[str]:
        """Return the keys of the constraints that are refused."""
        return [key for key in list(self._ends) if len(self._recent(key)) >= _ENDS]

    def error(self, key: str) -> ConstraintQuarantined | None:
        """Return the error of a constraint that is refused, or None."""
        if len(self._recent(key)) < _ENDS:
            return None
        why = f"this constraint has ended {_ENDS} mask actors: it is refused for ten minutes"
        return ConstraintQuarantined(f"{why}; try a simpler one, or another backend")

    def _recent(self, key: str) -> list[float]:
        now = time.monotonic()
        return [end for end in self._ends.get(key, ()) if now - end < _SECONDS]
