"""The metrics of mask pools, for Prometheus. The project's server and vLLM's
(`integrations/vllm`) have the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from guided.pools.status import EndCause, PoolStatus

_COUNTERS = (
    (
        "mask_replays",
        "Sequences opened on another mask actor after the end of theirs.",
        "replays",
    ),
    ("grammar_found", "Constraints found in the cache of grammars.", "cache_hits"),
    (
        "grammar_shared",
        "Constraints that waited for the compilation of an equal one.",
        "shared_compilations",
    ),
    (
        "constraints_quarantined",
        "Constraints that were refused because they ended mask actors.",
        "quarantines",
    ),
    (
        "compile_server_ends",
        "Fork servers of the compile processes that were lost.",
        "fork_server_ends",
    ),
)
"""Name and text of each counter, and the field of `PoolStatus`."""


def pool_metrics(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    """Yield the metrics of these pools, summed."""
    workers = [worker for pool in pools for worker in pool.workers]
    backends = [backend for pool in pools for backend in pool.backends]
    states = Counter(worker.state for worker in workers)
    gauges = (
        (
            "grammar_compiling",
            "Constraints that are being compiled or queued.",
            sum(pool.compiling for pool in pools),
        ),
        ("mask_actors_up", "Mask actors that are up.", states["up"]),
        (
            "mask_actors_down",
            "Mask actors that did not start at the last attempt.",
            states["down"],
        ),
        ("mask_actors", "Mask actors, up or not.", len(workers)),
        (
            "mask_open_sequences",
            "Open matchers.",
            sum(worker.open_sequences for worker in workers),
        ),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"guided_{name}", text, value=value)
    for name, text, attribute in _COUNTERS:
        yield CounterMetricFamily(
            f"guided_{name}",
            text,
            value=sum(getattr(pool, attribute) for pool in pools),
        )
    restarts = sum(worker.restarts for worker in workers)
    yield CounterMetricFamily(
        "guided_mask_actor_restarts", "Mask actors replaced.", value=restarts
    )
    crashes = Counter[str]()
    timeouts = Counter[str]()
    # Prometheus sees no increase in a new counter
    ends: Counter[str] = Counter(dict.fromkeys(get_args(EndCause), 0))
    for backend in backends:
        crashes[backend.name] += backend.crashes
        timeouts[backend.name] += backend.timeouts
    for worker in workers:
        ends.update(worker.ends)
    yield counts_by(
        "compile_crashes", "Compile processes that crashed.", "backend", crashes
    )
    yield counts_by(
        "compile_timeouts", "Compilations that took too long.", "backend", timeouts
    )
    yield counts_by("mask_actor_ends", "Mask actors that ended.", "cause", ends)


def counts_by(name: str, text: str, label: str, counts: Counter[str]) -> Metric:
    """Return a counter `guided_{name}` with one value for each of `counts`."""
    family = CounterMetricFamily(f"guided_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
