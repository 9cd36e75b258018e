"""Faults: signals to the server's processes, and harmful requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.traffic import Request
from benchmarks.report import ROOT
from benchmarks.servers import Server
from guided.backends import AUTO, BACKENDS

DATA = ROOT.parent / "shared" / "data" / "hostile-inputs.json"
DEPTH = 100_000
STREAM = 8
"""Number of constraints that are sent of a hostile input with a stream of
constraints."""
SLOW_SECONDS = (0.1, 2.0)
MEMORY_HOGS: list[dict[str, Any]] = [
    {"regex": "[ab]*a[ab]{20}", "backend": "outlines"},  # an automaton of 2^21 states
    {"regex": "([a-z]{1,60} ){1,90}", "backend": "outlines"},
    {
        "json_schema": {
            "type": "array",
            "items": {"enum": [f"{i:05}" * 9 for i in range(9000)]},
        },
        "backend": "outlines",
    },
]
"""Constraints within all admission limits. Their compilation needs gigabytes or never
ends."""
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Ada Reed, 8, York. Answer."}],
    "max_tokens": 48,
}


@dataclass
class Event:
    """One injected fault."""

    at: float
    """`time.monotonic()`."""
    fault: str
    index: int | None = None
    """Index of the mask actor, if the fault is one of a mask actor."""
    incarnation: int = 0


@dataclass
class Scene:
    """The server under test, and the faults so far."""

    server: Server
    actors: Callable[[], list[dict[str, Any]]]
    """Returns the mask actors, as /health shows them."""
    source: random.Random
    send: Callable[[Request], Awaitable[object]]
    """Sends a hostile request and checks its answer."""
    hostile: Sequence[Request] = ()
    """Requests from a file of hostile inputs."""
    events: list[Event] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    """Processes that were frozen."""

    async def inject(self, fault: str) -> None:
        """Inject one fault, if it has a target."""
        match fault:
            case "kill" | "freeze" | "slow":
                await self._signal(fault)
            case "memory":
                fields = self.source.choice(MEMORY_HOGS)
                await self._send(
                    fault,
                    Request(
                        0, {**MESSAGE, **fields}, hostile=f"memory hog {fields}"[:100]
                    ),
                )
            case "hostile" if self.hostile:
                await self._send(fault, self.source.choice(self.hostile))
            case "compile process":
                await self._kill_compile_process()

    async def _signal(self, fault: str) -> None:
        up = [
            actor
            for actor in self.actors()
            if actor["state"] == "up" and actor["pid"] not in self.stopped
        ]
        if not up:
            return
        actor = self.source.choice(up)
        pid = actor["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            self.events.append(
                Event(time.monotonic(), fault, actor["index"], actor["incarnation"])
            )
            if fault == "freeze":
                self.stopped.add(pid)
            elif fault == "slow":
                await asyncio.sleep(self.source.uniform(*SLOW_SECONDS))
                if pid not in self.stopped:  # otherwise it was frozen in the meantime
                    os.kill(pid, signal.SIGCONT)

    async def _kill_compile_process(self) -> None:
        pids = await asyncio.to_thread(self.server.pids, "compile process")
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self.source.choice(pids), signal.SIGKILL)
            self.events.append(Event(time.monotonic(), "compile process"))

    async def _send(self, fault: str, request: Request) -> None:
        self.events.append(Event(time.monotonic(), fault))
        await self.send(request)


ACTOR_FAULTS = ("kill", "freeze")
"""Faults that end an actor."""
OTHER_FAULTS = ("slow", "memory", "hostile", "compile process")


def hostile_requests(path: Path) -> list[Request]:
    """Read a file of hostile inputs, and return a request for each backend that
    supports the kind of an input.

    The file is JSON: `{"entries": [{"id", "kind", "scope", "payload" | "generator_py",
    ...}]}`. Generators are Python expressions: read only files that you trust.
    """
    sys.setrecursionlimit(DEPTH)  # some inputs are nested deeper than Python's default
    return [
        request
        for entry in json.loads(path.read_text())["entries"]
        for request in _requests(entry)
    ]


def _requests(entry: dict[str, Any]) -> Iterator[Request]:
    payload: Any = entry.get("payload")
    kind, scope = entry["kind"], entry["scope"]
    if "generator_py" in entry:
        modules = {
            "functools": functools,
            "itertools": itertools,
            "json": json,
            "random": random,
        }
        payload = eval(entry["generator_py"], modules)
    able = [
        AUTO,
        *(name for name, adapter in BACKENDS.items() if kind in adapter.kinds),
    ]
    match scope:
        case "request":
            fields, able = [payload], [AUTO]
        case "stream":
            fields = [_stream_fields(kind, each) for each in payload[:STREAM]]
        # the payload is the model's output: a choice with one option forces it
        case "model-output":
            fields = [{"choice": [payload]}]
        case _:
            fields = [{kind: payload}]
    for number, (backend, each) in enumerate(itertools.product(able, fields)):
        body = {**MESSAGE, "temperature": 0, "stream": True, "backend": backend, **each}
        yield Request(number, body, hostile=entry["id"])


def _stream_fields(kind: str, payload: Any) -> dict[str, Any]:
    """Return the request fields of one payload of a stream. It may be a
    `structured_outputs` value."""
    if isinstance(payload, dict) and payload.keys() <= {"json", "grammar"}:
        return {"structured_outputs": payload}
    return {kind: payload}
