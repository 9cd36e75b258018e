"""Load: concurrent clients, a record of each request, and the outputs without faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.chaos.traffic import Request, repeated
from benchmarks.chaos.verdicts import MUST_NOT, Verdict, verdict_of
from benchmarks.client import Answer, Choice, ask

REFERENCES = 4
"""How often each repeated request is sent before the first fault."""
LEAVE_SECONDS = 0.5


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
    bar: tqdm[Any]
    records: list[Record] = field(default_factory=list)

    async def send(self, request: Request) -> None:
        """Send one request and check its answer."""
        answer = await _answer(self.http, request, self.limit)
        verdict = verdict_of(request, answer, self.references)
        self.records.append(Record(request, answer.began, answer.ended, verdict))
        self.bar.update()

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


async def _answer(http: httpx.AsyncClient, request: Request, limit: float) -> Answer:
    """Send a request, and disconnect early if it says so: after some events of a stream, or some time."""
    number = request.number
    if not request.leaves:
        return await ask(http, request.body, limit)
    if request.body.get("stream") and number % 2 == 0:
        return await ask(http, request.body, limit, leave_events=3 + number % 5)
    return await ask(http, request.body, limit, leave_seconds=LEAVE_SECONDS * (1 + number % 7) / 7)


async def reference_outputs(http: httpx.AsyncClient, limit: float) -> dict[str, Choice]:
    """Return the outputs of the repeated requests without faults: `Request.key` -> output.

    Each is asked for several times, in batches with others. Where the output changes, rounding decides between two
    tokens, and it is left out.
    """
    found: dict[str, set[tuple[str, str | None]]] = {}
    slots = asyncio.Semaphore(8)

    async def record(request: Request) -> None:
        async with slots:
            answer = await _answer(http, request, limit)
        if verdict_of(request, answer, {}).outcome == "valid":
            choice = answer.choices[0]
            found.setdefault(request.key or "", set()).add((choice.text, choice.finish_reason))

    requests = repeated() * REFERENCES
    random.Random(0).shuffle(requests)
    await asyncio.gather(*map(record, requests))
    return {key: Choice(*outputs.pop()) for key, outputs in found.items() if len(outputs) == 1}
