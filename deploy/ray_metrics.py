"""The metrics of a replica in Ray's export, with the labels `replica`, `deployment` and
`application`.

A request for `/metrics` reaches only one replica. Ray exports the metrics of all
replicas on every node.
"""

from __future__ import annotations

import threading
import time
import weakref

from prometheus_client import CollectorRegistry
from ray.serve import metrics

_PERIOD_SECONDS = 5.0


def export_to_ray(registry: CollectorRegistry) -> None:
    """Copy a registry to Ray every few seconds, on a thread, as long as the registry
    exists.

    Every sample becomes a gauge with its name (`guided_engine_steps_total`,
    `..._bucket`), because Ray has no counters that can be set. Prometheus reads them as
    `ray_guided_...`.
    """
    threading.Thread(
        target=_run, args=(weakref.ref(registry),), name="ray-metrics", daemon=True
    ).start()


def _run(reference: weakref.ref[CollectorRegistry]) -> None:
    gauges: dict[str, metrics.Gauge] = {}
    while (registry := reference()) is not None:
        for metric in registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                if sample.name not in gauges:
                    gauges[sample.name] = metrics.Gauge(
                        sample.name, metric.documentation, tuple(sample.labels)
                    )
                gauges[sample.name].set(sample.value, sample.labels)
        del registry
        time.sleep(_PERIOD_SECONDS)
