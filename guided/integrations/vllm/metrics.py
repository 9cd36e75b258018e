"""Our metrics in vLLM's `/metrics`: the guided requests, and the state of the pool.

The engine's process has the pool, and its parent answers `/metrics`. So the engine writes the pool's state to a file,
named by its process id, and the parent reads those of its children.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import tempfile
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
from guided.pools.protocol import MaskPool, PoolStatus

REQUESTS = Counter("guided_requests", "Requests with a constraint that guided enforces, by its kind.", ["kind"])
"""Counted where requests are admitted."""
_log = logging.getLogger("guided.integrations")


def report(pool: MaskPool, is_closed: Callable[[], bool]) -> None:
    """Log the state of a pool, and write it for the process that answers `/metrics`, on a thread of its own."""
    threading.Thread(target=_report, args=(pool, is_closed), daemon=True).start()


def _report(pool: MaskPool, is_closed: Callable[[], bool]) -> None:
    file, last = _file(os.getpid()), ""
    atexit.register(file.unlink, missing_ok=True)
    try:
        while not is_closed():
            status = pool.status()
            new = file.with_suffix(f".{os.urandom(8).hex()}")
            new.write_bytes(msgspec.json.encode(status))
            new.replace(file)
            up = sum(worker.state == "up" for worker in status.workers)
            state = f"{up} of {len(status.workers)} workers of the mask pool are up"
            state += f": {status.trouble}" if status.trouble else ""
            if state != last:
                _log.info("%s", state)
            last = state
            time.sleep(2.0)
    except Exception as error:  # for example a full disk
        _log.info("the mask pool is not reported any more: %s", error)
    file.unlink(missing_ok=True)


@cache
def expose() -> None:
    """Add the pools of this process's engines to its metrics. Idempotent."""
    REGISTRY.register(_Pools())


class _Pools(Collector):
    def collect(self) -> Iterator[Metric]:
        pools: list[PoolStatus] = []
        for file in map(_file, [os.getpid(), *(child.pid for child in multiprocessing.active_children())]):
            with contextlib.suppress(OSError, ValueError):  # a process without a pool
                if file.stat().st_uid == os.getuid():
                    pools.append(msgspec.json.decode(file.read_bytes(), type=PoolStatus))
        yield from pool_metrics(pools)


def _file(pid: int | None) -> Path:
    return Path(tempfile.gettempdir(), f"guided-vllm-{pid}.json")
