"""What the server says of itself, and what its processes take, all the time."""

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

__all__ = ["Replacement", "Seen", "Watch", "replacements", "watching"]

HEALTH_SECONDS = 0.2
MEMORY_SECONDS = 5.0


@dataclass(frozen=True)
class Seen:
    """One look at /health."""

    at: float
    """`time.monotonic()`."""
    actors: list[dict[str, Any]]
    """As /health lists them; empty where it didn't answer."""
    took: float
    """Seconds until it answered."""
    reason: str | None = None

    @property
    def up(self) -> int:
        return sum(actor["state"] == "up" for actor in self.actors)


@dataclass
class Watch:
    """What was seen so far."""

    server: Server
    seen: list[Seen] = field(default_factory=list)
    memory: list[tuple[float, list[dict[str, Any]]]] = field(default_factory=list)
    deaths: int = 0
    """Times that the server's process was gone, or said that its engine was."""

    def actors(self) -> list[dict[str, Any]]:
        """The mask actors as /health listed them last."""
        return self.seen[-1].actors if self.seen else []


async def watching(watch: Watch, http: httpx.AsyncClient) -> None:
    """Look again and again, until cancelled or the server is dead."""
    weighing = asyncio.create_task(_weighing(watch))
    try:
        while watch.deaths == 0:
            await _look(watch, http)
            await asyncio.sleep(HEALTH_SECONDS)
    finally:
        weighing.cancel()


async def _look(watch: Watch, http: httpx.AsyncClient) -> None:
    begun = time.monotonic()
    try:
        answer = (await http.get("/health", timeout=30)).json()
        watch.seen.append(Seen(begun, answer["pool"]["actors"], time.monotonic() - begun, answer["reason"]))
    except httpx.HTTPError as error:
        watch.seen.append(Seen(begun, [], time.monotonic() - begun, type(error).__name__))
    if not watch.server.alive or "engine has died" in (watch.seen[-1].reason or ""):
        watch.deaths += 1


async def _weighing(watch: Watch) -> None:
    while True:
        watch.memory.append((time.monotonic(), await asyncio.to_thread(watch.server.memory)))
        await asyncio.sleep(MEMORY_SECONDS)


@dataclass(frozen=True)
class Replacement:
    """What became of an actor that was killed or frozen. Seconds after the fault; None where it wasn't seen."""

    noticed: float | None
    """It was no longer said to be up."""
    replaced: float | None
    """Its next incarnation was up."""


def replacements(events: Sequence[Event], seen: Sequence[Seen]) -> list[Replacement]:
    """One for each fault that ends a mask actor."""
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
