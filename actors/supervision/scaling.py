"""Scaling: how many mask actors a pool has, between `min_actors` and `max_actors`, by the load of the last seconds.

More actors help where masks are late because the actors are busy. They do not help where masks wait for something
else: the network, or cores that other processes use. So two things are measured: what the steps waited for, and how
busy the actors were.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.steps.dispatcher import Load
from actors.supervision.supervisor import Supervisor

_INTERVAL_SECONDS = 1.0
_EXPOSED_SHARE = 0.05
"""If steps wait for masks for more than this share of the time, there are too few actors."""
_LATE_SHARE = 0.02
"""If more than this share of the rows have no mask at the step's deadline, there are too few actors."""
_BUSY_SHARE = 0.5
"""More actors help only if those that are up are busy for more than this share of the time."""
_ENOUGH_SHARE = 0.4
"""If fewer actors would be busy for less than this share of the time, they are enough. Less than `_BUSY_SHARE`, so that
the number does not go up and down under the same load."""
_TARGET_SHARE = 0.6
"""Share of the time that actors are to be busy after a change."""
_log = logging.getLogger(__name__)


class ScalingPolicy:
    """Decides how many actors are wanted.

    If there are too few, more are wanted at once, and even more only when those are up. One less is wanted after fewer
    have been enough for `patience` seconds.

    Args:
        least, most: limits of the number of actors.
        wanted: the number at the start.
        patience: seconds.
    """

    def __init__(self, least: int, most: int, wanted: int, patience: float) -> None:
        self._least, self._most, self._patience = least, most, patience
        self.wanted = wanted
        self.reason = ""
        """What was measured at the last update."""
        self._before: tuple[Load, float] | None = None
        self._enough_since: float | None = None
        """Since when fewer actors would be enough."""

    def update(self, load: Load, up: int, now: float) -> int:
        """Return how many actors are wanted.

        Args:
            load: the counters now.
            up: how many of the wanted actors are up.
            now: seconds of any clock. The first call only begins the measurement.
        """
        before, self._before = self._before, (replace(load), now)
        if before is None or now <= before[1]:
            return self.wanted
        then, seconds = before[0], now - before[1]
        busy = (load.mask_seconds - then.mask_seconds) / seconds
        exposed = (load.exposed_seconds - then.exposed_seconds) / seconds
        late = (load.late - then.late) / max(1, load.rows - then.rows)
        unplaced = load.unplaced - then.unplaced
        self.reason = (
            f"masks exposed {exposed:.0%} of the time, {late:.0%} of the rows late, {unplaced} rows without an actor, "
            f"{busy:.1f} of {up} actors busy"
        )
        is_behind = exposed > _EXPOSED_SHARE or late > _LATE_SHARE
        if unplaced or (is_behind and busy > _BUSY_SHARE * up):
            self._enough_since = None
            if up >= self.wanted:
                self.wanted = min(self._most, max(self.wanted + 1, math.ceil(busy / _TARGET_SHARE)))
        elif busy > _ENOUGH_SHARE * (self.wanted - 1) or self.wanted == self._least:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        elif now - self._enough_since >= self._patience:
            self.wanted, self._enough_since = self.wanted - 1, now
        return self.wanted


class Scaler:
    """Starts and drains the actors of a pool as the policy wants it, in a thread of its own until `stop`.

    Args:
        supervisors: of all actors that the pool may have.
        load: returns the pool's counters.
    """

    def __init__(self, supervisors: Sequence[Supervisor], policy: ScalingPolicy, load: Callable[[], Load]) -> None:
        self._supervisors = supervisors
        self._policy = policy
        self._load = load
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The actors stay."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_SECONDS):
            up = sum(each.status().state == "up" for each in self._supervisors)
            before = self._policy.wanted
            wanted = self._policy.update(self._load(), up, time.monotonic())
            if wanted != before:
                _log.info("%d mask actors are wanted instead of %d: %s", wanted, before, self._policy.reason)
                for place, supervisor in enumerate(sorted(self._supervisors, key=_rank)):
                    supervisor.set_wanted(place < wanted)


_STATES = ("up", "starting", "restarting", "down", "draining", "stopped")


def _rank(supervisor: Supervisor) -> tuple[int, int, int]:
    """Return a sort key: the actors to keep come first."""
    status = supervisor.status()
    return _STATES.index(status.state), -status.open_sequences, status.index
