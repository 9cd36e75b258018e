"""RayMetrics: the metrics of a replica in Ray's export, with the labels `replica`, `deployment` and `application`.

A request for `/metrics` reaches any one replica. Ray exports the metrics of all replicas on every node.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from ray.serve import metrics

_PERIOD_SECONDS = 5.0


class RayMetrics:
    """Copies a registry to Ray every few seconds, as long as this object exists.

    Every sample becomes a gauge with its name (`guided_engine_steps_total`, `..._bucket`), because Ray has no counters
    that can be set. Prometheus reads them as `ray_guided_...`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, metrics.Gauge] = {}
        stopped = threading.Event()
        weakref.finalize(self, stopped.set)
        threading.Thread(target=_run, args=(weakref.ref(self), stopped), name="ray-metrics", daemon=True).start()

    def copy(self) -> None:
        """Copy all samples now."""
        for metric in self._registry.collect():
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    self._gauge(sample.name, metric.documentation, sample.labels).set(sample.value, sample.labels)

    def _gauge(self, name: str, text: str, labels: Mapping[str, str]) -> metrics.Gauge:
        if name not in self._gauges:
            self._gauges[name] = metrics.Gauge(name, text, tuple(labels))
        return self._gauges[name]


def _run(reference: weakref.ref[RayMetrics], stopped: threading.Event) -> None:
    while (found := reference()) is not None:
        found.copy()
        del found
        stopped.wait(_PERIOD_SECONDS)
