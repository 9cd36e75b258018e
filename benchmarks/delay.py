"""Artificial delays."""

from __future__ import annotations

import functools
import time


def delay(kind: str, seconds: float) -> None:
    """Sleep ("sleep"), or run a loop in C that holds the GIL for so many CPU seconds ("hold")."""
    if kind == "sleep":
        time.sleep(seconds)
    else:
        sum(range(int(seconds / _seconds_per_iteration())))


@functools.cache
def _seconds_per_iteration() -> float:
    iterations = 1_000_000

    def once() -> float:
        started = time.thread_time()  # correct on a busy machine too
        sum(range(iterations))
        return (time.thread_time() - started) / iterations

    return min(once() for _ in range(5))
