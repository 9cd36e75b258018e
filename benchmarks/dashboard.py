"""Draw the Grafana dashboard and `guided top` with the data of a real server: `python -m benchmarks.dashboard`.

A default server gets every kind of request, and loses a mask actor in the middle. Its `/metrics` are read every other
second, as Prometheus does, and the queries of deploy/monitoring/dashboard.json are evaluated on them: only what of
PromQL these queries use. Writes dashboard.png and top.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.load import Load, client_for
from benchmarks.chaos.server import Server, default_vocabulary, running_server
from benchmarks.chaos.traffic import Mix, Traffic
from benchmarks.paths import RESULTS, ROOT
from engine.server.top import View

_PANELS = json.loads((ROOT / "deploy" / "monitoring" / "dashboard.json").read_text())["panels"]
_INTERVAL_SECONDS, _RATE_SECONDS = 2.0, 12.0
_COLUMNS = 3
Labels = frozenset[tuple[str, str]]
Scrape = dict[tuple[str, Labels], float]
Scrapes = list[tuple[float, Scrape]]


class Vector(dict[Labels, float]):
    """An instant vector of Prometheus."""

    def __truediv__(self, other: Vector) -> Vector:
        return Vector({labels: value / other[labels] for labels, value in self.items() if other.get(labels)})


class Moment:
    """Evaluates queries at the time of the last of `scrapes`."""

    def __init__(self, scrapes: Scrapes) -> None:
        self._now, self._scrape = scrapes[-1]
        self._then, self._before = next(each for each in scrapes if each[0] >= self._now - _RATE_SECONDS)

    def value(self, query: str) -> Vector:
        """Return the result of a query."""
        query = re.sub(r"(rate|increase)\((\w+)(\{[^}]*\})\[[^]]*\]\)", r"increase('\2', '\3', '\1')", query)
        query = re.sub(r"(?<!')\b(guided_\w+)(\{[^}]*\})", r"gauge('\1', '\2')", query)
        query = re.sub(r"\b(sum|max)(?: by \(([^)]*)\) )?\(", r"grouped(\1, '\2', ", query)
        functions = {"gauge": self.gauge, "increase": self.increase, "grouped": self.grouped}
        found: Vector = eval(query, {**functions, "histogram_quantile": self.quantile})
        return found

    def gauge(self, name: str, matchers: str) -> Vector:
        wanted = re.findall(r'(\w+)(!?=)"([^"]*)"', matchers)

        def matches(labels: Labels) -> bool:
            return all((dict(labels).get(label) == text) == (sign == "=") for label, sign, text in wanted)

        return Vector({key[1]: value for key, value in self._scrape.items() if key[0] == name and matches(key[1])})

    def increase(self, name: str, matchers: str, function: str) -> Vector:
        seconds = (self._now - self._then) or 1.0 if function == "rate" else 1.0
        found, before = self.gauge(name, matchers).items(), self._before
        return Vector(
            {labels: (value - before[name, labels]) / seconds for labels, value in found if (name, labels) in before}
        )

    def grouped(self, function: Callable[[list[float]], float], by: str, vector: Vector) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            kept = frozenset(each for each in labels if each[0] in by.split(", "))
            groups.setdefault(kept, []).append(value)
        return Vector({labels: function(values) for labels, values in groups.items()})

    def quantile(self, share: float, buckets: Vector) -> Vector:
        series: dict[Labels, list[tuple[float, float]]] = {}
        for labels, count in buckets.items():
            rest = frozenset(each for each in labels if each[0] != "le")
            series.setdefault(rest, []).append((float(dict(labels)["le"]), count))
        return Vector({labels: _quantile(share, sorted(each)) for labels, each in series.items() if max(each)[1]})


def _quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for limit, count in buckets:
        if count >= wanted and limit != float("inf"):
            return low + (limit - low) * (wanted - below) / ((count - below) or 1)
        low, below = limit if limit != float("inf") else low, count
    return low


async def record(server: Server, options: argparse.Namespace) -> Scrapes:
    """Put the server under load. Return its metrics, and write what `guided top` shows meanwhile."""
    scrapes: Scrapes = []
    begun, to_kill, view = time.monotonic(), server.pids("mask actor")[:1], View.of(server.url)
    async with client_for(server.url, options.concurrency) as http, httpx.AsyncClient() as prometheus:
        load = Load(http, Judge(default_vocabulary()), 120.0)
        running = load.run(Traffic(1, Mix()), options.concurrency, lambda: time.monotonic() < begun + options.seconds)
        busy = asyncio.create_task(running)
        while not busy.done():
            answer = await prometheus.get(f"{server.url}/metrics", timeout=30)
            samples = (each for family in text_string_to_metric_families(answer.text) for each in family.samples)
            found = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
            scrapes.append((time.monotonic() - begun, found))
            await asyncio.to_thread(view.update)
            if to_kill and scrapes[-1][0] > options.seconds / 2:
                os.kill(to_kill.pop(), signal.SIGKILL)
            if scrapes[-1][0] < options.seconds:
                console = Console(record=True, width=110, file=io.StringIO())
                console.print(view.render())
                console.save_svg(str(options.out / "top.svg"), title="guided top")
            await asyncio.sleep(_INTERVAL_SECONDS)
        await busy
    print(dict(load.outcomes()))
    return scrapes


def draw(scrapes: Scrapes, path: Path) -> None:
    """Draw the panels of the dashboard."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, PercentFormatter

    panels = [each for each in _PANELS if each["type"] != "row"]
    rows = -(-len(panels) // _COLUMNS)
    with pyplot.style.context("dark_background"):
        figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(17, 2.6 * rows), layout="constrained")
        for axis, panel in zip(axes.flat, panels, strict=False):
            unit = panel["fieldConfig"]["defaults"].get("unit")
            axis.yaxis.set_major_formatter(
                PercentFormatter(1.0) if unit == "percentunit" else EngFormatter("s" if unit == "s" else "")
            )
            _draw_panel(axis, panel, scrapes)
        figure.savefig(path, dpi=80)


def _draw_panel(axis: Any, panel: dict[str, Any], scrapes: Scrapes) -> None:
    for target in panel["targets"]:
        query = re.sub(r',?\s*job=~"\$job",?\s*', "", target["expr"])
        lines: dict[Labels, list[tuple[float, float]]] = {}
        for end in range(1, len(scrapes) + 1):
            for labels, value in Moment(scrapes[:end]).value(query).items():
                lines.setdefault(labels, []).append((scrapes[end - 1][0], value))
        for labels, points in lines.items():
            name = target["legendFormat"]
            for label, text in labels:
                name = name.replace(f"{{{{{label}}}}}", text)
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axis.set_title(panel["title"], fontsize=10, loc="left")
    axis.set_xlim(0, scrapes[-1][0])
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.2)
    if axis.lines:
        axis.legend(fontsize=7, frameon=False, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server("--num-actors", "2") as server:
        scrapes = asyncio.run(record(server, options))
    draw(scrapes, options.out / "dashboard.png")


if __name__ == "__main__":
    main()
