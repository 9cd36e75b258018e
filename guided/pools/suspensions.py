"""Suspension of backends that crash their compile processes too often.

Only the backend is suspended: `auto` skips it, and a request that names it gets `BackendSuspended` (503). Timeouts and
memory limits do not count, because they depend on the constraint. One constraint that crashes again and again does not
suffice either: several different ones have to crash. Each of these requests gets its own error in any case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from guided.errors import BackendSuspended
from guided.pools.protocol import BackendStatus

CRASHES = 5
"""A backend is suspended when this many constraints crash it within `_WINDOW_SECONDS`."""
_WINDOW_SECONDS = 60.0
_FIRST_SECONDS = 30.0
"""Length of the first suspension. Each one that follows soon is twice as long as the one before."""
_LAST_SECONDS = 600.0
"""Maximum length of a suspension."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Suspension:
    until: float = 0.0
    """End of the latest suspension."""
    seconds: float = 0.0
    """Length of the latest suspension."""

    def begin(self, now: float) -> None:
        # A backend that worked as long as it had been suspended (at least a minute) starts again with the first length.
        soon = self.seconds and now - self.until < max(self.seconds, _WINDOW_SECONDS)
        self.seconds = min(2 * self.seconds, _LAST_SECONDS) if soon else _FIRST_SECONDS
        self.until = now + self.seconds


@dataclass(slots=True)
class _Record:
    crashes: int = 0
    timeouts: int = 0
    suspensions: int = 0
    recent: dict[str, float] = field(default_factory=dict)
    """Constraints that crashed the backend recently: the time of each one's latest crash."""
    suspension: _Suspension = field(default_factory=_Suspension)


class Suspensions:
    """Counts the failed compilations of each backend. Thread-safe.

    Args:
        clock: seconds that never decrease.
    """

    def __init__(self, backends: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records = {name: _Record() for name in backends}

    def admitted(self, backends: Sequence[str]) -> tuple[str, ...]:
        """Return those of `backends` that are not suspended.

        Raises:
            BackendSuspended: all are.
        """
        suspended = self._seconds_left(backends)
        usable = tuple(name for name in backends if name not in suspended)
        if not usable:
            raise _error(suspended)
        return usable

    def error(self, backends: Sequence[str]) -> BackendSuspended | None:
        """Return the error for those of `backends` that are suspended; None if none is."""
        suspended = self._seconds_left(backends)
        return _error(suspended) if suspended else None

    def _seconds_left(self, backends: Sequence[str]) -> dict[str, float]:
        """Return the suspended ones of `backends`, and the seconds left of each suspension."""
        with self._lock:
            now = self._clock()
            seconds_left = {name: self._record(name).suspension.until - now for name in backends}
        return {name: seconds for name, seconds in seconds_left.items() if seconds > 0}

    def crashed(self, backend: str, constraint: str) -> None:
        """Record that compiling the constraint with this key crashed the backend."""
        with self._lock:
            record, now = self._record(backend), self._clock()
            record.crashes += 1
            record.recent[constraint] = now
            record.recent = {key: last for key, last in record.recent.items() if now - last < _WINDOW_SECONDS}
            if len(record.recent) < CRASHES or record.suspension.until > now:
                return
            record.suspension.begin(now)
            record.suspensions += 1
            record.recent.clear()
            seconds = record.suspension.seconds
        text = "backend %s is suspended for %.0f s: compiling with it crashed on %d constraints within %.0f s"
        _log.error(text, backend, seconds, CRASHES, _WINDOW_SECONDS)

    def timed_out(self, backend: str) -> None:
        """Record that a compilation with this backend took too long."""
        with self._lock:
            self._record(backend).timeouts += 1

    def status(self) -> list[BackendStatus]:
        """Return a snapshot of all backends."""
        with self._lock:
            now = self._clock()
            return [
                BackendStatus(
                    name,
                    "up" if record.suspension.until <= now else "suspended",
                    record.crashes,
                    record.timeouts,
                    record.suspensions,
                    round(max(0.0, record.suspension.until - now), 1),
                )
                for name, record in self._records.items()
            ]

    def _record(self, backend: str) -> _Record:
        return self._records.setdefault(backend, _Record())


def _error(suspended: Mapping[str, float]) -> BackendSuspended:
    """Return the error for suspended backends and the seconds that are left of each suspension."""
    seconds = min(suspended.values())
    error = BackendSuspended(
        f"{' and '.join(suspended)} crashed on several constraints and is suspended for {seconds:.0f} s more; "
        "try another backend",
        param="backend",
    )
    error.retry_after = max(1.0, seconds)
    return error
