"""Faults: signals to the server's processes, and harmful requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.server import Server
from benchmarks.chaos.traffic import CHAT, Request
from benchmarks.chaos.watch import Watch
from benchmarks.processes import COMPILE_ACTOR, COMPILE_PROCESS, FORK_SERVER

MASK_ACTOR_FAULTS = ("kill", "freeze")
"""Faults that end a mask actor."""
COMPILE_ACTOR_FAULT = "compile actor"
SLOW_SECONDS = (0.1, 2.0)
MEMORY_HOGS: list[dict[str, Any]] = [
    {"regex": "[ab]*a[ab]{20}", "backend": "outlines"},  # an automaton of 2^21 states
    {"regex": "([a-z]{1,60} ){1,90}", "backend": "outlines"},
    {"json_schema": {"type": "array", "items": {"enum": [f"{i:05}" * 9 for i in range(9000)]}}, "backend": "outlines"},
]
"""Constraints within all admission limits. Their compilation needs gigabytes or never ends."""


@dataclass
class Event:
    """One injected fault."""

    at: float
    """`time.monotonic()`."""
    fault: str
    target: str
    index: int | None = None
    """Index of the mask actor, if it was one."""
    incarnation: int | None = None


@dataclass
class Scene:
    """The server under test, and the faults so far."""

    server: Server
    watch: Watch
    source: random.Random
    send: Callable[[Request], Awaitable[None]]
    """Sends a hostile request and checks its answer."""
    hostile: Sequence[Request] = ()
    """Requests from a file of hostile inputs."""
    events: list[Event] = field(default_factory=list)
    sent: int = 0
    stopped: set[int] = field(default_factory=set)
    """Frozen processes that may still exist."""


async def inject(scene: Scene, fault: str) -> bool:
    """Inject one fault. Returns False if it has no target."""
    event = await FAULTS[fault](scene)
    if event is None:
        return False
    scene.events.append(event)
    return True


def thaw(scene: Scene) -> None:
    """Continue the frozen processes that still exist."""
    for pid in scene.stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _kill(scene: Scene) -> Event | None:
    """Send SIGKILL to a mask actor that is up."""
    return _signal(scene, "kill", signal.SIGKILL)


async def _freeze(scene: Scene) -> Event | None:
    """Send SIGSTOP to a mask actor that is up."""
    event = _signal(scene, "freeze", signal.SIGSTOP)
    if event is not None:
        scene.stopped.add(int(event.target))
    return event


async def _slow(scene: Scene) -> Event | None:
    """Send SIGSTOP to a mask actor, and SIGCONT a moment later."""
    event = _signal(scene, "slow", signal.SIGSTOP)
    if event is not None:
        await asyncio.sleep(scene.source.uniform(*SLOW_SECONDS))
        pid = int(event.target)
        with contextlib.suppress(ProcessLookupError):
            if pid not in scene.stopped:  # otherwise `_freeze` froze it in the meantime
                os.kill(pid, signal.SIGCONT)
    return event


async def _kill_compile_process(scene: Scene) -> Event | None:
    return await _kill_by_kind(scene, "compile process", COMPILE_PROCESS, FORK_SERVER)


async def _kill_compile_actor(scene: Scene) -> Event | None:
    return await _kill_by_kind(scene, "compile actor", COMPILE_ACTOR)


async def _memory(scene: Scene) -> Event | None:
    """Send a constraint that needs too much memory to compile or compiles without end."""
    fields = scene.source.choice(MEMORY_HOGS)
    message = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8}
    return await _send(scene, "memory", Request(0, CHAT, {**message, **fields}, hostile=f"memory hog {fields}"[:100]))


async def _hostile(scene: Scene) -> Event | None:
    """Send one of the hostile inputs of the file."""
    if not scene.hostile:
        return None
    return await _send(scene, "hostile", scene.source.choice(scene.hostile))


Fault = Callable[[Scene], Awaitable[Event | None]]
FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "freeze": _freeze,
    "slow": _slow,
    "memory": _memory,
    "hostile": _hostile,
    "compile process": _kill_compile_process,
    COMPILE_ACTOR_FAULT: _kill_compile_actor,
}


def _signal(scene: Scene, fault: str, number: signal.Signals) -> Event | None:
    up = [actor for actor in scene.watch.actors() if actor["state"] == "up" and actor["pid"] not in scene.stopped]
    if not up:
        return None
    actor = scene.source.choice(up)
    try:
        os.kill(actor["pid"], number)
    except ProcessLookupError:
        return None
    return Event(time.monotonic(), fault, str(actor["pid"]), actor["index"], actor["incarnation"])


async def _kill_by_kind(scene: Scene, fault: str, *kinds: str) -> Event | None:
    pids = await asyncio.to_thread(scene.server.pids, *kinds)
    if not pids:
        return None
    pid = scene.source.choice(pids)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Event(time.monotonic(), fault, str(pid))


async def _send(scene: Scene, fault: str, request: Request) -> Event:
    scene.sent += 1
    event = Event(time.monotonic(), fault, request.hostile or "")
    await scene.send(request)
    return event
