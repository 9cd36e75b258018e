"""Poll the server's health and the memory of its processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.chaos.server import Server

if TYPE_CHECKING:
    from benchmarks.chaos.faults import Event

HEALTH_SECONDS = 0.2
MEMORY_SECONDS = 5.0


@dataclass(frozen=True)
class Seen:
    """One answer of /health."""

    at: float
    """`time.monotonic()`."""
    actors: list[dict[str, Any]]
    """The actors in the answer; empty if there was none."""
    took: float
    """Seconds until the answer."""
    reason: str | None = None

    @property
    def up(self) -> int:
        return sum(actor["state"] == "up" for actor in self.actors)


@dataclass
class Watch:
    """Health and memory samples so far."""

    server: Server
    seen: list[Seen] = field(default_factory=list)
    memory: list[tuple[float, list[dict[str, Any]]]] = field(default_factory=list)
    deaths: int = 0
    """How often the server's process was gone or reported a dead engine."""

    def actors(self) -> list[dict[str, Any]]:
        """Return the mask actors in the last answer of /health."""
        return self.seen[-1].actors if self.seen else []


async def watching(watch: Watch, http: httpx.AsyncClient) -> None:
    """Poll until cancelled or until the server is dead."""
    memory = asyncio.create_task(_poll_memory(watch))
    try:
        while watch.deaths == 0:
            await _look(watch, http)
            await asyncio.sleep(HEALTH_SECONDS)
    finally:
        memory.cancel()


async def _look(watch: Watch, http: httpx.AsyncClient) -> None:
    begun = time.monotonic()
    try:
        answer = (await http.get("/health", timeout=30)).json()
        watch.seen.append(Seen(begun, answer["pool"]["actors"], time.monotonic() - begun, answer["reason"]))
    except httpx.HTTPError as error:
        watch.seen.append(Seen(begun, [], time.monotonic() - begun, type(error).__name__))
    if not watch.server.alive or "engine has died" in (watch.seen[-1].reason or ""):
        watch.deaths += 1


async def _poll_memory(watch: Watch) -> None:
    while True:
        watch.memory.append((time.monotonic(), await asyncio.to_thread(watch.server.memory)))
        await asyncio.sleep(MEMORY_SECONDS)


@dataclass(frozen=True)
class Replacement:
    """The recovery of a killed or frozen actor, in seconds after the fault; None if it wasn't observed."""

    noticed: float | None
    """It was no longer reported as up."""
    replaced: float | None
    """Its next incarnation was up."""


def replacements(events: Sequence[Event], seen: Sequence[Seen]) -> list[Replacement]:
    """Return one per fault that ends a mask actor."""
    return [_replacement(event, seen) for event in events if event.incarnation is not None and event.fault != "slow"]


def _replacement(event: Event, seen: Sequence[Seen]) -> Replacement:
    noticed = None
    for look in seen:
        for actor in look.actors:
            if look.at > event.at and actor["index"] == event.index:
                is_next = actor["incarnation"] > (event.incarnation or 0)
                if noticed is None and (is_next or actor["state"] != "up"):
                    noticed = look.at - event.at
                if is_next and actor["state"] == "up":
                    return Replacement(noticed, look.at - event.at)
    return Replacement(noticed, None)
