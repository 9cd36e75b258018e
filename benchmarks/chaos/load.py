"""Load: concurrent clients, and a record of each request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.chaos.checks import MUST_NOT, Judge, Verdict
from benchmarks.chaos.client import Answer, ask
from benchmarks.chaos.traffic import Request, Traffic


@dataclass(frozen=True)
class Record:
    """The result of one request. Times are `time.monotonic()`, in seconds."""

    number: int
    kind: str
    good: bool
    hostile: str | None
    began: float
    decided: float | None
    ended: float
    verdict: Verdict

    def describe(self) -> str:
        return f"request {self.number} ({self.hostile or self.kind}): {self.verdict.outcome}: {self.verdict.cause}"


@dataclass
class Load:
    """Sends requests and keeps their verdicts.

    Args:
        limit: seconds after which a request counts as hung.
    """

    http: httpx.AsyncClient
    judge: Judge
    limit: float
    records: list[Record] = field(default_factory=list)
    on_answer: Callable[[Request, Answer], None] = lambda request, answer: None
    """Called with every answer."""

    async def send(self, request: Request) -> Record:
        """Send one request and check its answer."""
        answer = await ask(self.http, request, self.limit)
        self.on_answer(request, answer)
        verdict = self.judge.verdict(request, answer)
        kind = "plain" if request.example is None else f"{request.example.kind}, {request.backend}"
        times = (answer.began, answer.decided, answer.ended)
        record = Record(request.number, kind, request.good, request.hostile, *times, verdict)
        self.records.append(record)
        return record

    async def run(self, traffic: Traffic, concurrency: int, going_on: Callable[[], bool]) -> None:
        """Keep `concurrency` requests in flight while `going_on()` is true. Returns when all are answered."""
        numbers = itertools.count(len(self.records))
        await self._share(concurrency, (traffic.request(number) for number in numbers), going_on)

    async def all_of(self, requests: Iterable[Request], concurrency: int) -> None:
        """Send these requests, `concurrency` at a time."""
        await self._share(concurrency, iter(requests), lambda: True)

    async def _share(self, concurrency: int, requests: Iterator[Request], going_on: Callable[[], bool]) -> None:
        async def client() -> None:
            while going_on():
                request = next(requests, None)
                if request is None:
                    return
                await self.send(request)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    @property
    def good(self) -> list[Record]:
        """Requests that are not hostile, from clients that stay."""
        return [record for record in self.records if record.good]

    def outcomes(self) -> Counter[str]:
        """Count the outcomes."""
        return Counter(record.verdict.outcome for record in self.records)

    def causes(self, records: Sequence[Record]) -> Counter[str]:
        """Count the error codes of failed and rejected requests."""
        return Counter(each.verdict.cause for each in records if each.verdict.outcome in ("failed", "refused"))

    def violations(self) -> list[Record]:
        """Requests with an outcome that no fault excuses."""
        return [record for record in self.records if record.verdict.outcome in MUST_NOT]


def client_for(url: str, connections: int, address: str | None = None) -> httpx.AsyncClient:
    """Return an HTTP client without a timeout, for so many connections.

    Args:
        address: its own address, for example 127.0.0.2, by which the server can tell it from other clients.
    """
    # No idle connections: httpcore also closes one that expires while a request that was given it has not begun.
    # Then the request fails with `ReadError`.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(limits=limits, local_address=address)
    return httpx.AsyncClient(base_url=url, timeout=None, transport=transport)


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition. Returns whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def ended(task: Awaitable[object]) -> None:
    """Wait for a cancelled task."""
    await asyncio.gather(task, return_exceptions=True)
