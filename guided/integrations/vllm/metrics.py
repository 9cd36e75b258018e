"""Our metrics in vLLM's `/metrics`: the guided requests, and the state of the pool.

The engine's process has the pool, and its parent answers `/metrics`. So the engine
writes the pool's state to a file in memory, and the parent reads those of its children.
vLLM kills its engine's process, so a file on disk would stay.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from prometheus_client import REGISTRY, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from guided.pools.metrics import pool_metrics
from guided.pools.protocol import MaskPool
from guided.pools.status import PoolStatus

REQUESTS = Counter(
    "guided_requests",
    "Requests with a constraint that guided enforces, by its kind.",
    ["kind"],
)
"""Counted where requests are admitted."""
_NAME = "guided-pool-status"
"""Of the file in memory."""
_log = logging.getLogger("guided.integrations")


def report(pool: MaskPool, is_closed: Callable[[], bool]) -> None:
    """Log the state of a pool, and write it for the process that answers `/metrics`, on
    a thread of its own."""
    threading.Thread(target=_report, args=(pool, is_closed), daemon=True).start()


def _report(pool: MaskPool, is_closed: Callable[[], bool]) -> None:
    last = ""
    with open(os.memfd_create(_NAME), "wb", buffering=0) as file:
        while not is_closed():
            status = pool.status()
            content = msgspec.json.encode(status)
            os.pwrite(file.fileno(), content, 0)
            file.truncate(len(content))
            up = sum(worker.state == "up" for worker in status.workers)
            state = f"{up} of {len(status.workers)} workers of the mask pool are up"
            if status.trouble:
                state += f": {status.trouble}"
            if state != last:
                _log.info("%s", state)
            last = state
            time.sleep(2.0)


@cache
def expose() -> None:
    """Add the pools of this process's engines to its metrics. Idempotent."""
    REGISTRY.register(_Pools())


class _Pools(Collector):
    def collect(self) -> Iterator[Metric]:
        pools: list[PoolStatus] = []
        for pid in [
            os.getpid(),
            *(child.pid for child in multiprocessing.active_children()),
        ]:
            with contextlib.suppress(OSError):  # it has ended
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    # it was closed, or is being written
                    with contextlib.suppress(OSError, ValueError):
                        if file.readlink().name.startswith(f"memfd:{_NAME}"):
                            pools.append(
                                msgspec.json.decode(file.read_bytes(), type=PoolStatus)
                            )
        yield from pool_metrics(pools)
