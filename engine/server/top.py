"""`guided top`: a live view of a server in the terminal, from its `/health` and `/metrics`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SECONDS = 5.0
"""Time limit of a reading."""

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
    """Renders readings. Rates are between the last two, failures since the first."""

    url: str
    first: Reading
    before: Reading
    now: Reading

    @classmethod
    def of(cls, url: str) -> View:
        """Take the first reading."""
        first = Reading.of(url.rstrip("/"))
        return cls(url.rstrip("/"), first, first, first)

    def update(self) -> None:
        """Take another reading."""
        self.before, self.now = self.now, Reading.of(self.url)

    def render(self) -> RenderableType:
        """Return the view."""
        if self.now.problem is not None:
            return Text(f"{self.url} does not answer: {self.now.problem}", style="bold red")
        health = self.now.health
        style = "bold green" if health["status"] == "ok" else "bold red"
        reason = f": {health['reason']}" if health["reason"] else ""
        title = Text(f"{self.url}  {time.strftime('%H:%M:%S')}  {health['status']}{reason}", style=style)
        parts: list[RenderableType] = [title, self._numbers(), self._actors()]
        if failures := self._failures():
            parts.append(Text(f"failures since the start: {failures}", style="yellow"))
        return Group(*parts)

    def _failures(self) -> str:
        found = []
        for (name, labels), value in self.now.samples.items():
            new = value - self.first.samples.get((name, labels), 0)
            if name == "guided_request_failures_total" and new > 0:
                found.append(f"{new:.0f} x {dict(labels)['code']}")
        return ", ".join(found)

    def _numbers(self) -> Table:
        def count(name: str) -> str:
            return f"{self.now.total(name):.0f}"

        actors = f"{count('mask_actors_up')} of {count('mask_actors')} wanted"
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for cells in (
            ("running", count("num_requests_running"), "tokens/s", f"{self._rate('generation_tokens_total'):.0f}"),
            ("waiting", count("num_requests_waiting"), "steps/s", f"{self._rate('engine_steps_total'):.1f}"),
            ("for a grammar", count("num_requests_waiting_for_grammar"), "step", self._per_step("engine_step")),
            ("compile queue", count("grammar_compiling"), "exposed masks", self._per_step("mask_exposed")),
            ("late masks", count("num_sequences_late"), "hidden masks", self._per_step("mask_hidden")),
            ("KV cache", f"{self.now.total('kv_cache_usage_perc'):.0%}", "mask actors", actors),
        ):
            table.add_row(*cells)
        return table

    def _actors(self) -> Table:
        columns = ("index", "node", "pid", "state", "open_sequences", "restarts", "last_end")
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for actor in self.now.health.get("pool", {}).get("actors", []):
            cells = ["-" if actor[name] is None else str(actor[name])[:80] for name in columns]
            table.add_row(*cells, style="" if actor["state"] == "up" else "red")
        return table

    def _growth(self, name: str) -> float:
        """Return by how much a counter has grown; 0 after a restart of the server."""
        return max(0.0, self.now.total(name) - self.before.total(name)) if self.before.samples else 0.0

    def _rate(self, name: str) -> float:
        seconds = self.now.at - self.before.at
        return self._growth(name) / seconds if seconds else 0.0

    def _per_step(self, name: str) -> str:
        steps = self._growth("engine_steps_total")
        return f"{1000 * self._growth(f'{name}_seconds_total') / steps:.2f} ms a step" if steps else "-"
