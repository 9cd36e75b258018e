"""Record the health of the server during a chaos run, and the figures and violations of
the run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.chaos.faults import Event
from benchmarks.chaos.load import Load
from benchmarks.report import percentiles
from benchmarks.servers import Server

HEALTH_SECONDS = 0.2
SHOWN = 20


@dataclass(frozen=True)
class Seen:
    """An answer of /health."""

    at: float
    """`time.monotonic()`."""
    actors: list[dict[str, Any]]
    """The actors in the answer; empty without an answer."""
    took: float
    """Seconds until the answer."""


@dataclass
class Watch:
    """The answers of /health so far."""

    server: Server
    seen: list[Seen] = field(default_factory=list)
    is_dead: bool = False
    """Whether the server's process was gone or reported a dead engine."""

    def actors(self) -> list[dict[str, Any]]:
        """Return the mask actors in the last answer."""
        return self.seen[-1].actors if self.seen else []

    async def run(self, http: httpx.AsyncClient) -> None:
        """Poll until cancelled or until the server is dead."""
        while not self.is_dead:
            begun, actors, reason = time.monotonic(), [], ""
            try:
                answer = (await http.get("/health", timeout=30)).json()
                actors, reason = answer["pool"]["actors"], answer["reason"] or ""
            except httpx.HTTPError:
                pass
            self.seen.append(Seen(begun, actors, time.monotonic() - begun))
            self.is_dead = not self.server.alive or "engine has died" in reason
            await asyncio.sleep(HEALTH_SECONDS)


def seconds_to_replace(
    events: Sequence[Event], seen: Sequence[Seen]
) -> list[float | None]:
    """Return, for each fault that ends a mask actor, the seconds until the next
    incarnation was up, or None."""
    found: list[float | None] = []
    for event in events:
        if event.fault in ("kill", "freeze"):
            after = [
                look.at - event.at
                for look in seen
                for actor in look.actors
                if actor["index"] == event.index
                and actor["incarnation"] > event.incarnation
                and actor["state"] == "up"
            ]
            found.append(after[0] if after else None)
    return found


@dataclass
class Run:
    """A finished chaos run."""

    begun: float
    """`time.monotonic()`."""
    lasted: float
    """Seconds until the last request was answered."""
    load: Load
    calm: Load
    """Requests that were sent after the last fault."""
    events: list[Event]
    watch: Watch
    recovered: bool
    """Whether all mask actors were up again in time."""
    memory: tuple[float, float]
    """PSS of all processes before and after the run, in MiB."""


def violations(run: Run, *, every_good: bool) -> list[str]:
    """Return the violations, one line each.

    Args:
        every_good: whether all good requests must get valid answers.
    """
    lost = [record for record in run.calm.good if record.is_lost]
    lost += [record for record in run.load.good if record.is_lost and every_good]
    found = [
        record.describe()
        for record in [*run.load.violations(), *run.calm.violations(), *lost][:SHOWN]
    ]
    if run.watch.is_dead:
        found.append("the engine or the server died")
    if not run.recovered:
        found.append("not all mask actors were up again after the last fault")
    return found


def summary(run: Run) -> dict[str, Any]:
    """Return the figures."""
    load, outcomes, good = run.load, run.load.outcomes(), run.load.good
    replaced = seconds_to_replace(run.events, run.watch.seen)
    waits = [
        record.ended - record.began
        for record in good
        if record.verdict.outcome == "valid"
    ]
    return {
        "requests": len(load.records),
        "requests_per_second": round(len(load.records) / run.lasted, 2),
        "valid": outcomes["valid"],
        "left_by_the_client": outcomes["left"],
        "good": len(good),
        "good_and_valid": len(waits),
        "good_lost_by_cause": dict(
            Counter(each.verdict.cause for each in good if each.is_lost)
        ),
        "hostile": dict(
            Counter(
                each.verdict.outcome for each in load.records if each.request.hostile
            )
        ),
        "invalid_outputs": outcomes["invalid"],
        "different_outputs": outcomes["different"],
        "undeclared_errors": outcomes["undeclared"],
        "hung": outcomes["hung"],
        "engine_died": run.watch.is_dead,
        "recovered": run.recovered,
        "calm_afterwards": dict(run.calm.outcomes()),
        "faults": dict(Counter(event.fault for event in run.events)),
        "never_replaced": replaced.count(None),
        "seconds_to_replace": _spread([each for each in replaced if each is not None]),
        "seconds_of_good_answers": _spread(waits),
        "milliseconds_of_health": percentiles(
            [look.took for look in run.watch.seen if look.actors]
        ),
        "pss_mib": {"before": round(run.memory[0]), "after": round(run.memory[1])},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {"p50": round(float(np.median(seconds)), 2), "max": round(max(seconds), 2)}
