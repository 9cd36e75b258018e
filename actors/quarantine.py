"""Quarantine: constraints that have ended several mask actors are refused for a
while."""

from __future__ import annotations

import math
import time

from guided.errors import ConstraintQuarantined

_SECONDS = 600.0
_APART_SECONDS = 1.0
"""Ends that follow each other more closely count as one: something else may have ended
several actors at once."""


class Quarantine:
    """Which constraints are refused, by their keys: those that have ended two actors
    within `_SECONDS`."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """`time.monotonic()` of the last end of an actor, by the key of the
        constraint."""
        self._until: dict[str, float] = {}
        """`time.monotonic()` until which a constraint is refused."""
        self.total = 0
        """Number of constraints that were put into quarantine."""

    def note(self, key: str) -> None:
        """Note that a constraint has ended an actor. One actor may be ended by
        anything."""
        now = time.monotonic()
        since = now - self._last.get(key, -math.inf)
        if since < _APART_SECONDS:
            return
        self._last[key] = now
        if since <= _SECONDS:
            self.total += key not in self.keys()
            self._until[key] = now + _SECONDS

    def keys(self) -> list[str]:
        """Return the keys of the constraints that are refused. From any thread."""
        now = time.monotonic()
        return [key for key, until in list(self._until.items()) if now < until]

    def error(self, key: str) -> ConstraintQuarantined | None:
        """Return the error of a constraint that is refused, or None."""
        if key not in self.keys():
            return None
        why = "this constraint has ended 2 mask actors: it is refused for ten minutes"
        return ConstraintQuarantined(f"{why}; try a simpler one, or another backend")
