"""The witness: good clients and a prober of `/health`, in a process and at an address of their own.

What the attacking process does with its own event loop does not delay them.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import httpx

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.client import ask
from benchmarks.chaos.examples import EXAMPLES
from benchmarks.chaos.load import Load, Record, client_for, ended
from benchmarks.chaos.server import default_vocabulary
from benchmarks.chaos.traffic import CHAT, Request, constrained, plain
from guided.backends import AUTO
from guided.constraint import KINDS

ADDRESS = "127.0.0.2"
CLIENTS = 3
PAUSE_SECONDS = 0.05
LIMIT_SECONDS = 35.0
"""A request or probe without an answer after this time is hung: the server waits 30 s at most for a lost pool."""
REFUSALS = 20
"""Refused probes in a row after which the server is taken for dead."""


@dataclass(frozen=True)
class Probe:
    """One GET /health on a new connection. Times are `time.monotonic()`, which processes share."""

    at: float
    took: float
    answered: bool


@dataclass(frozen=True)
class Seen:
    """What the witness saw in one case."""

    records: list[Record]
    probes: list[Probe]


class Witness:
    """Controls the process. It observes between `start` and `stop`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there,), daemon=True)
        self._process.start()
        assert self._here.recv() is None  # it is ready

    def start(self, url: str, key: str | None) -> None:
        self._here.send((url, key))

    def stop(self) -> Seen:
        """Let the requests in flight end, and return everything seen since `start`."""
        self._here.send(None)
        seen: Seen = self._here.recv()
        return seen

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _run(connection: Connection) -> None:
    judge = Judge(default_vocabulary())
    connection.send(None)
    while True:
        connection.send(asyncio.run(_observe(connection, judge, *connection.recv())))


async def warm_up(url: str, key: str | None) -> None:
    """Send every good request once, so that its constraint is compiled."""
    async with _client(url, key) as http:
        for request in itertools.islice(_requests(), 4 * len(KINDS)):
            await ask(http, request, 60)


def _client(url: str, key: str | None) -> httpx.AsyncClient:
    http = client_for(url, 64, ADDRESS)
    if key is not None:
        http.headers["authorization"] = f"Bearer {key}"
    return http


def _requests() -> Iterator[Request]:
    """Yield small requests: without constraint, and of every kind; every second one is streamed."""
    for number in itertools.count():
        index, kind = number // 2, KINDS[number // 2 % len(KINDS)]
        request = plain(number, index % 6) if number % 2 else constrained(number, EXAMPLES[kind][0], AUTO, CHAT)
        request.body.update(stream=index % 2 == 0)
        yield request


async def _observe(connection: Connection, judge: Judge, url: str, key: str | None) -> Seen:
    over = asyncio.Event()
    probes: list[Probe] = []
    async with _client(url, key) as http:
        load, requests = Load(http, judge, LIMIT_SECONDS), _requests()

        async def client() -> None:
            while not over.is_set():
                await load.send(next(requests))
                await asyncio.sleep(PAUSE_SECONDS)

        async def probe() -> None:
            began, answered = time.monotonic(), False
            try:
                async with asyncio.timeout(LIMIT_SECONDS):
                    await http.get("/health", headers={"connection": "close"})
                answered = True
            except (httpx.HTTPError, TimeoutError):
                pass
            probes.append(Probe(began, time.monotonic() - began, answered))

        async def probing() -> None:
            while not over.is_set():
                await probe()
                recent = probes[-REFUSALS:]
                if len(recent) == REFUSALS and not any(each.answered or each.took > 1 for each in recent):
                    over.set()
                await asyncio.sleep(PAUSE_SECONDS)

        work = asyncio.gather(probing(), *(client() for _ in range(CLIENTS)))
        await asyncio.to_thread(connection.recv)
        over.set()
        await ended(work)
    return Seen(load.records, probes)
