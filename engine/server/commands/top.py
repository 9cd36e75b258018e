"""`guided top`: a live view of a server in the terminal, from its `/health` and
`/metrics`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.server.commands.parameters import reported
from guided.json_text import JsonObject

_SECONDS = 5.0
"""Time limit of a request to the server."""


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one view and end.")
    ] = False,
) -> None:
    """Show a running server: engine, mask actors by node, queues, exposed mask time,
    failures."""
    console = Console()
    with reported("top", 1):
        before = Snapshot.of(url)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(
            console=console, screen=console.is_terminal and not once, auto_refresh=False
        ) as live,
    ):
        while True:
            time.sleep(interval)
            now = Snapshot.of(url)
            live.update(view(url, before, now), refresh=True)
            if once:
                raise typer.Exit(now.problem is not None)
            before = now


@dataclass(frozen=True)
class Snapshot:
    """The server's health and metrics at one time."""

    at: float
    health: Mapping[str, Any]
    """The body of `/health`. Empty if the server did not answer."""
    samples: Mapping[tuple[str, str], float]
    """Name without prefix, and error code or "" -> value, summed over all other
    labels."""
    problem: str | None = None

    @classmethod
    def of(cls, url: str) -> Snapshot:
        """Read `/health` and `/metrics` of the server."""
        import httpx  # httpx and prometheus_client come with the extra `server`
        from prometheus_client.parser import text_string_to_metric_families

        now = time.monotonic()
        samples: dict[tuple[str, str], float] = {}
        try:
            # a status of 503 also has a body
            health = httpx.get(f"{url.rstrip('/')}/health", timeout=_SECONDS).json()
            metrics = (
                httpx.get(f"{url.rstrip('/')}/metrics", timeout=_SECONDS)
                .raise_for_status()
                .text
            )
            for family in text_string_to_metric_families(metrics):
                for sample in family.samples:
                    key = (
                        sample.name.removeprefix("guided_"),
                        sample.labels.get("code", ""),
                    )
                    samples[key] = samples.get(key, 0.0) + sample.value
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return cls(now, {}, {}, str(error))
        return cls(now, health, samples)

    def total(self, name: str) -> float:
        return self.samples.get((name, ""), 0.0)


def view(url: str, before: Snapshot, now: Snapshot) -> RenderableType:
    """Render a reading, with rates since the reading `before`."""
    if now.problem is not None:
        return Text(f"{url} does not answer: {now.problem}", style="bold red")
    status = now.health["status"]
    style = "bold red"
    if status == "ok":
        style = "bold green"
    title = f"{url}  {time.strftime('%H:%M:%S')}  {status}"
    if now.health["reason"]:
        title += f": {now.health['reason']}"
    parts: list[RenderableType] = [
        Text(title, style),
        _numbers(before, now),
        _actors(now.health["pool"]["actors"]),
    ]
    failures = []
    for (name, code), count in now.samples.items():
        if name == "request_failures_total" and count > 0:
            failures.append(f"{count:.0f} x {code}")
    if failures:
        parts.append(Text(f"failures: {', '.join(failures)}", "yellow"))
    return Group(*parts)


def _numbers(before: Snapshot, now: Snapshot) -> Table:
    def count(name: str) -> str:
        return f"{now.total(name):.0f}"

    def growth(name: str) -> float:
        """Return by how much a counter has grown; 0 after a restart of the server."""
        if before.samples:
            return max(0.0, now.total(name) - before.total(name))
        return 0.0

    def rate(name: str) -> str:
        return f"{growth(name) / (now.at - before.at):.1f}"

    def per_step(name: str) -> str:
        steps = growth("engine_steps_total")
        if steps:
            return f"{1000 * growth(f'{name}_seconds_total') / steps:.2f} ms a step"
        return "-"

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for cells in (
        (
            "running",
            count("num_requests_running"),
            "tokens/s",
            rate("generation_tokens_total"),
        ),
        (
            "waiting",
            count("num_requests_waiting"),
            "steps/s",
            rate("engine_steps_total"),
        ),
        (
            "for a grammar",
            count("num_requests_waiting_for_grammar"),
            "step",
            per_step("engine_step"),
        ),
        (
            "compile queue",
            count("grammar_compiling"),
            "exposed masks",
            per_step("mask_exposed"),
        ),
        (
            "late masks",
            count("num_sequences_late"),
            "hidden masks",
            per_step("mask_hidden"),
        ),
        (
            "KV cache",
            f"{now.total('kv_cache_usage_perc'):.0%}",
            "mask actors",
            f"{count('mask_actors_up')} up",
        ),
    ):
        table.add_row(*cells)
    return table


def _actors(actors: list[JsonObject]) -> Table:
    columns = (
        "index",
        "node",
        "pid",
        "state",
        "open_sequences",
        "restarts",
        "last_end",
    )
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for actor in actors:
        cells = []
        for name in columns:
            value = actor[name]
            if value is None:
                value = "-"
            cells.append(str(value)[:80])
        style = "red"
        if actor["state"] == "up":
            style = ""
        table.add_row(*cells, style=style)
    return table
