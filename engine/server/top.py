"""`guided top`: a live view of a server in the terminal, from its `/health` and `/metrics`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SECONDS = 5.0
_FAILURES_KEPT = 8

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and labels."""


@dataclass(frozen=True)
class Reading:
    """The server's health and metrics at one time."""

    at: float
    health: Mapping[str, Any]
    """Empty if the server did not answer."""
    samples: Mapping[Sample, float]
    problem: str | None = None

    @classmethod
    def of(cls, url: str) -> Reading:
        """Ask the server."""
        now = time.monotonic()
        try:
            health = json.loads(_get(f"{url}/health"))
            families = text_string_to_metric_families(_get(f"{url}/metrics").decode())
            found = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in families
                for sample in family.samples
            }
        except (OSError, ValueError) as error:
            return cls(now, {}, {}, str(error))
        return cls(now, health, found)

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels."""
        return sum(value for (each, _), value in self.samples.items() if each == f"guided_{name}")

    def labelled(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield the labels and values of a metric."""
        return ((dict(labels), value) for (each, labels), value in self.samples.items() if each == f"guided_{name}")


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 503:  # `/health` of a server that is not healthy
            raise
        content = error.read()
    return content


@dataclass
class View:
    """Renders readings. Rates are between the last two."""

    url: str
    now: Reading
    before: Reading
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=_FAILURES_KEPT))
    """The latest failures, oldest first."""

    @classmethod
    def of(cls, url: str) -> View:
        """Take the first reading."""
        first = Reading.of(url.rstrip("/"))
        return cls(url.rstrip("/"), first, first)

    def update(self) -> None:
        """Take another reading."""
        self.before, self.now = self.now, Reading.of(self.url)
        stamp = time.strftime("%H:%M:%S")
        if not self.before.samples:
            return
        known = {labels["code"]: value for labels, value in self.before.labelled("request_failures_total")}
        for labels, value in self.now.labelled("request_failures_total"):
            if (new := value - known.get(labels["code"], 0)) > 0:
                self.failures.append(f"{stamp}  {new:.0f} x {labels['code']}")
        ends = {actor["index"]: actor["restarts"] for actor in self._actors(self.before)}
        for actor in self._actors(self.now):
            if actor["restarts"] > ends.get(actor["index"], 0):
                self.failures.append(f"{stamp}  actor {actor['index']}: {actor['last_end']}")

    def render(self) -> RenderableType:
        """Return the view."""
        if self.now.problem is not None:
            return Text(f"{self.url} does not answer: {self.now.problem}", style="bold red")
        parts: list[RenderableType] = [self._title(), self._numbers(), self._workers()]
        if self.failures:
            parts.append(Text("\n".join(("last failures", *reversed(self.failures))), style="yellow"))
        return Group(*parts)

    def _title(self) -> Text:
        health = self.now.health
        style = "bold green" if health["status"] == "ok" else "bold red"
        reason = f": {health['reason']}" if health["reason"] else ""
        return Text(f"{self.url}  {time.strftime('%H:%M:%S')}  {health['status']}{reason}", style=style)

    def _numbers(self) -> Table:
        now, tokens = self.now, self._rate("generation_tokens_total")
        steps, cores = self._rate("engine_steps_total"), self._rate("mask_seconds_total")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for cells in (
            ("running", f"{now.total('num_requests_running'):.0f}", "tokens/s", f"{tokens:.0f}"),
            ("waiting", f"{now.total('num_requests_waiting'):.0f}", "steps/s", f"{steps:.1f}"),
            (
                "for a grammar",
                f"{now.total('num_requests_waiting_for_grammar'):.0f}",
                "step",
                self._per_step("engine_step"),
            ),
            ("compile queue", f"{now.total('grammar_compiling'):.0f}", "exposed masks", self._per_step("mask_exposed")),
            ("late masks", f"{now.total('num_sequences_late'):.0f}", "hidden masks", self._per_step("mask_hidden")),
            ("KV cache", f"{now.total('kv_cache_usage_perc'):.0%}", "mask cores", f"{cores:.2f}"),
            ("mask actors", self._up(), "", ""),
            ("first token", self._mean("time_to_first_token"), "between tokens", self._mean("inter_token_latency")),
        ):
            table.add_row(*cells)
        return table

    def _workers(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("actor", "node", "address", "pid", "state", "sequences", "restarts", "last end"):
            table.add_column(name, justify="right" if name in ("pid", "sequences", "restarts") else "left")
        by_node = sorted(self._actors(self.now), key=lambda each: (str(each["address"] or each["node"]), each["index"]))
        for actor in by_node:
            state = Text(actor["state"], style="" if actor["state"] == "up" else "red")
            where = (actor["node"] or "-", actor["address"] or "-", str(actor["pid"] or "-"))
            counts = (str(actor["open_sequences"]), str(actor["restarts"]))
            table.add_row(str(actor["index"]), *where, state, *counts, (actor["last_end"] or "")[:80])
        return table

    def _up(self) -> str:
        up, wanted = self.now.total("mask_actors_up"), self.now.total("mask_actors")
        return f"{up:.0f} of {wanted:.0f} wanted"

    @staticmethod
    def _actors(reading: Reading) -> list[dict[str, Any]]:
        actors: list[dict[str, Any]] = reading.health.get("pool", {}).get("actors", [])
        return actors

    def _growth(self, name: str) -> float:
        """Return by how much a counter has grown; 0 after a restart of the server."""
        return max(0.0, self.now.total(name) - self.before.total(name)) if self.before.samples else 0.0

    def _rate(self, name: str) -> float:
        seconds = self.now.at - self.before.at
        return self._growth(name) / seconds if seconds else 0.0

    def _per_step(self, name: str) -> str:
        steps = self._growth("engine_steps_total")
        return f"{1000 * self._growth(f'{name}_seconds_total') / steps:.2f} ms a step" if steps else "-"

    def _mean(self, name: str) -> str:
        count = self._growth(f"{name}_seconds_count")
        return f"{1000 * self._growth(f'{name}_seconds_sum') / count:.0f} ms" if count else "-"
