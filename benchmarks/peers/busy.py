"""Taking time on purpose."""

from __future__ import annotations

import functools
import time

__all__ = ["busy"]


def busy(kind: str, seconds: float) -> None:
    """Take time: "sleep", or "hold": one loop in C of so many CPU seconds, during which no other Python thread of
    the process runs."""
    if kind == "sleep":
        time.sleep(seconds)
    else:
        sum(range(int(seconds / _seconds_a_turn())))


@functools.cache
def _seconds_a_turn() -> float:
    turns = 1_000_000

    def once() -> float:
        started = time.thread_time()  # on a busy machine too
        sum(range(turns))
        return (time.thread_time() - started) / turns

    return min(once() for _ in range(5))
