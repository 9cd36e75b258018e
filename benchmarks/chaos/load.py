"""Load: concurrent clients, a record of each request, and the outputs without faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import httpx

from benchmarks.chaos.answers import MUST_NOT, Choice, Verdict, ask, verdict_of
from benchmarks.chaos.traffic import Request, repeated

REFERENCES = 4
"""How often each repeated request is sent before the first fault."""


def client_for(url: str, connections: int) -> httpx.AsyncClient:
    """Return an HTTP client without a timeout, for so many connections."""
    # No idle connections: httpcore also closes one that expires while a request that was given it has not begun.
    # Then the request fails with `ReadError`.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


@dataclass(frozen=True)
class Record:
    """The result of one request. Times are `time.monotonic()`, in seconds."""

    request: Request
    began: float
    ended: float
    verdict: Verdict

    @property
    def is_lost(self) -> bool:
        """Whether it was answered with an error."""
        return self.verdict.outcome in ("failed", "refused")

    def describe(self) -> str:
        request = self.request
        kind = f"{request.example.kind}, {request.backend}" if request.example else request.hostile or "plain"
        return f"request {request.number} ({kind}): {self.verdict.outcome}: {self.verdict.cause}"


@dataclass
class Load:
    """Sends requests and keeps their verdicts.

    Args:
        references: `Request.key` -> output without faults.
        limit: seconds after which a request counts as hung.
    """

    http: httpx.AsyncClient
    references: Mapping[str, Choice]
    limit: float
    records: list[Record] = field(default_factory=list)

    async def send(self, request: Request) -> None:
        """Send one request and check its answer."""
        answer = await ask(self.http, request, self.limit)
        verdict = verdict_of(request, answer, self.references)
        self.records.append(Record(request, answer.began, answer.ended, verdict))

    async def run(
        self, requests: Iterable[Request], concurrency: int, going_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Send requests, `concurrency` at a time, while `going_on()` is true. Returns when all are answered."""
        left = iter(requests)

        async def client() -> None:
            while going_on() and (request := next(left, None)) is not None:
                await self.send(request)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    @property
    def good(self) -> list[Record]:
        """Requests that are not hostile, from clients that stay."""
        return [record for record in self.records if record.request.good]

    def outcomes(self) -> Counter[str]:
        """Count the outcomes."""
        return Counter(record.verdict.outcome for record in self.records)

    def violations(self) -> list[Record]:
        """Requests with an outcome that no fault excuses."""
        return [record for record in self.records if record.verdict.outcome in MUST_NOT]


async def reference_outputs(http: httpx.AsyncClient, limit: float) -> dict[str, Choice]:
    """Return the outputs of the repeated requests without faults: `Request.key` -> output.

    Each is asked for several times, in batches with others. Where the output changes, rounding decides between two
    tokens, and it is left out.
    """
    found: dict[str, set[tuple[str, str | None]]] = {}
    slots = asyncio.Semaphore(8)

    async def record(request: Request) -> None:
        async with slots:
            answer = await ask(http, request, limit)
        if verdict_of(request, answer, {}).outcome == "valid":
            choice = answer.choices[0]
            found.setdefault(request.key or "", set()).add((choice.text, choice.finish_reason))

    requests = repeated() * REFERENCES
    random.Random(0).shuffle(requests)
    await asyncio.gather(*map(record, requests))
    return {key: Choice(*outputs.pop()) for key, outputs in found.items() if len(outputs) == 1}
