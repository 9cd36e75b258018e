"""Quarantine: constraints that have ended several mask actors are refused for a while."""

from __future__ import annotations

import time
from collections import deque

from guided.errors import ConstraintQuarantined

_ENDS = 2
"""So many ends: one actor may be ended by anything."""
_SECONDS = 600.0
_APART_SECONDS = 1.0
"""Ends that follow each other more closely count as one: something else may have ended several actors at once."""


class Quarantine:
    """Which constraints are refused, by their keys. For any thread."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = {}
        """`time.monotonic()` of the last ends of actors."""
        self.total = 0
        """Number of constraints that were put into quarantine."""

    def note(self, key: str) -> None:
        """Note that a constraint has ended an actor."""
        ends = self._ends.setdefault(key, deque(maxlen=_ENDS))
        now = time.monotonic()
        if ends and now - ends[-1] < _APART_SECONDS:
            return
        was_refused = self.error(key) is not None
        ends.append(now)
        self.total += not was_refused and self.error(key) is not None

    def keys(self) -> list[str]:
        """Return the keys of the constraints that are refused."""
        return [key for key in list(self._ends) if self.error(key) is not None]

    def error(self, key: str) -> ConstraintQuarantined | None:
        """Return the error of a constraint that is refused, or None."""
        ends = self._ends.get(key)
        if ends is None or len(ends) < _ENDS or time.monotonic() - ends[0] >= _SECONDS:
            return None
        why = f"this constraint has ended {_ENDS} mask actors: it is refused for ten minutes"
        return ConstraintQuarantined(f"{why}; try a simpler one, or another backend")
