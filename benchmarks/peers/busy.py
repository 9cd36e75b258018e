"""Taking time on purpose."""

from __future__ import annotations

import functools
import time

__all__ = ["busy"]


def busy(kind: str, seconds: float) -> None:
    """Take time: "sleep", or "hold": one loop in C, during which no other Python thread of the process runs."""
    if kind == "sleep":
        time.sleep(seconds)
    else:
        sum(range(int(seconds / _seconds_a_turn())))


@functools.cache
def _seconds_a_turn() -> float:
    turns = 2_000_000
    started = time.perf_counter()
    sum(range(turns))
    return (time.perf_counter() - started) / turns
