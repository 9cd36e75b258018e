"""Load: clients that ask one after the other, and what became of each request."""

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

__all__ = ["Load", "Record", "client_for"]

IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Record:
    """What became of one request. Times are `time.monotonic()`, in seconds."""

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
    """Requests that were sent, and their verdicts.

    Args:
        limit: seconds after which a request is hung.
    """

    http: httpx.AsyncClient
    judge: Judge
    limit: float
    records: list[Record] = field(default_factory=list)
    heard: Callable[[Request, Answer], None] = lambda request, answer: None
    """Told of every answer."""

    async def send(self, request: Request) -> Record:
        """One request, judged."""
        answer = await ask(self.http, request, self.limit)
        self.heard(request, answer)
        verdict = self.judge.verdict(request, answer)
        kind = "plain" if request.example is None else f"{request.example.kind}, {request.backend}"
        times = (answer.began, answer.decided, answer.ended)
        record = Record(request.number, kind, request.good, request.hostile, *times, verdict)
        self.records.append(record)
        return record

    async def run(self, traffic: Traffic, concurrency: int, going_on: Callable[[], bool]) -> None:
        """`concurrency` clients, each with a request under way while `going_on()`; returns when all are answered."""
        numbers = itertools.count(len(self.records))
        await self._share(concurrency, (traffic.request(number) for number in numbers), going_on)

    async def all_of(self, requests: Iterable[Request], concurrency: int) -> None:
        """These requests, `concurrency` at a time."""
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
        """Those that nobody meant to harm, or to leave."""
        return [record for record in self.records if record.good]

    def outcomes(self) -> Counter[str]:
        """How many of each outcome."""
        return Counter(record.verdict.outcome for record in self.records)

    def causes(self, records: Sequence[Record]) -> Counter[str]:
        """Error codes of those that failed or were refused."""
        wanted = ("failed", "refused")
        return Counter(each.verdict.cause for each in records if each.verdict.outcome in wanted)

    def shameful(self) -> list[Record]:
        """What no fault excuses."""
        return [record for record in self.records if record.verdict.outcome in MUST_NOT]


def client_for(url: str, connections: int) -> httpx.AsyncClient:
    """An HTTP client without limits of its own."""
    # The server closes connections that were idle for 5 s; one must not be used in that moment.
    limits = httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_SECONDS
    )
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def ended(task: Awaitable[object]) -> None:
    """Await a task that was cancelled."""
    await asyncio.gather(task, return_exceptions=True)
