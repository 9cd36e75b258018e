"""Reports of the pool's state: in vLLM's log, and in its `/metrics`.

The engine's process has the pool, and another process answers `/metrics`. So the state is a note in the run directory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache

import msgspec
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from guided.integrations.vllm.run_directory import identity, notes_of_running, write_note
from guided.pools.metrics import pool_metrics
from guided.pools.protocol import MaskPool, PoolStatus

REPORT_SECONDS = 2.0
"""Interval of the reports."""
_DIRECTORY = "pools"
_log = logging.getLogger("guided.integrations")


def start(pool: MaskPool) -> None:
    """Report the state of `pool` until it is dropped, on a thread of its own."""
    threading.Thread(target=_report, args=(weakref.ref(pool),), name="pool-reports", daemon=True).start()


def _report(reference: weakref.ref[MaskPool]) -> None:
    process, last = identity(os.getpid()), ""
    name = f"{process} {id(reference)}".replace(" ", "-")
    try:
        while (pool := reference()) is not None:
            status = pool.status()
            del pool
            write_note(_DIRECTORY, name, {"process": process, "status": asdict(status)})
            up = sum(worker.state == "up" for worker in status.workers)
            state = f"{up} of {len(status.workers)} workers of the mask pool are up"
            state += f": {status.trouble}" if status.trouble else ""
            if state != last:
                _log.info("%s", state)
            last = state
            time.sleep(REPORT_SECONDS)
    except Exception as error:  # for example because the run directory is removed at the end
        _log.info("the mask pool is not reported any more: %s", error)


@cache
def expose() -> None:
    """Add the pools of this run to the metrics of this process. Idempotent."""
    REGISTRY.register(_Pools())


class _Pools(Collector):
    def collect(self) -> Iterator[Metric]:
        yield from pool_metrics([msgspec.convert(note["status"], PoolStatus) for note in notes_of_running(_DIRECTORY)])

    def describe(self) -> Iterator[Metric]:
        """Return no names: reading them would need a pool."""
        return iter(())
