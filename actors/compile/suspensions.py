"""Backends that are left alone for a while, because the processes that compiled with them crashed too often.

It is a backend that is out of rotation then, not the service: `auto` passes it by, who names it is told so (503).
Timeouts and memory say something about constraints, and don't count; nor does one constraint that crashes again and
again: it takes several. Whoever crashed a backend is told so either way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from guided.errors import BackendSuspended
from guided.pool import BackendStatus

__all__ = ["Suspensions"]

CRASHES = 5
"""Constraints that have to crash it ..."""
WINDOW_SECONDS = 60.0
"""... within this time."""
FIRST_SECONDS = 30.0
LAST_SECONDS = 600.0
"""How long it is left alone: doubled from time to time, from the first to the last."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    crashes: int = 0
    timeouts: int = 0
    suspensions: int = 0
    recent: dict[str, float] = field(default_factory=dict)
    """When which constraint crashed it last."""
    until: float = 0.0
    seconds: float = 0.0
    """Of the latest suspension."""


class Suspensions:
    """What became of compilations, backend by backend. Thread-safe.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, backends: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records = {name: _Record() for name in backends}

    def admitted(self, backends: Sequence[str]) -> tuple[str, ...]:
        """Those of `backends` that are in rotation.

        Raises:
            BackendSuspended: none is.
        """
        with self._lock:
            now = self._clock()
            left = {name: self._record(name).until - now for name in backends}
        able = tuple(name for name in backends if left[name] <= 0)
        if not able:
            error = BackendSuspended(
                f"{' and '.join(backends)} crashed on several constraints and is left alone for "
                f"{min(left.values()):.0f} s more; another backend may do",
                param="backend",
            )
            error.retry_after = max(1.0, min(left.values()))
            raise error
        return able

    def crashed(self, backend: str, constraint: str) -> None:
        """Compiling `constraint` (its key) ended the process."""
        with self._lock:
            record, now = self._record(backend), self._clock()
            record.crashes += 1
            record.recent[constraint] = now
            record.recent = {key: when for key, when in record.recent.items() if now - when < WINDOW_SECONDS}
            if len(record.recent) < CRASHES or record.until > now:
                return
            # It was well for as long as it had been left alone: that counts as a new beginning.
            again = record.seconds and now - record.until < max(record.seconds, WINDOW_SECONDS)
            record.seconds = min(2 * record.seconds, LAST_SECONDS) if again else FIRST_SECONDS
            record.until = now + record.seconds
            record.suspensions += 1
            record.recent.clear()
        _log.error(
            "backend %s is out of rotation for %.0f s: compiling with it crashed on %d constraints within %.0f s",
            backend,
            record.seconds,
            CRASHES,
            WINDOW_SECONDS,
        )

    def timed_out(self, backend: str) -> None:
        """A compilation with it took too long."""
        with self._lock:
            self._record(backend).timeouts += 1

    def status(self) -> list[BackendStatus]:
        """A snapshot."""
        with self._lock:
            now = self._clock()
            return [
                BackendStatus(
                    name,
                    "up" if record.until <= now else "suspended",
                    record.crashes,
                    record.timeouts,
                    record.suspensions,
                    max(0.0, record.until - now),
                )
                for name, record in self._records.items()
            ]

    def _record(self, backend: str) -> _Record:
        return self._records.setdefault(backend, _Record())
