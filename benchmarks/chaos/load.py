"""Keep requests of concurrent clients in flight, and judge each answer: valid, a
declared error, or a violation."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import jsonschema
from tqdm import tqdm

from benchmarks.chaos.traffic import Example, Request, repeated
from benchmarks.client import Answer, Choice, ask
from engine.server.http_errors import QueueFull, ShuttingDown
from guided.errors import GuidedError, InternalError

REFERENCES = 4
"""Number of times that each repeated request is sent before the first fault."""
LEAVE_SECONDS = 0.5
Outcome = Literal[
    "valid", "failed", "refused", "left", "invalid", "different", "undeclared", "hung"
]
MUST_NOT: tuple[Outcome, ...] = ("invalid", "different", "undeclared", "hung")
"""Outcomes that are violations under any fault."""


def _codes(root: type[GuidedError]) -> set[str]:
    return {root.code}.union(*(_codes(child) for child in root.__subclasses__()))


_SHAPE = {
    "invalid_request",
    "invalid_json",
    "invalid_type",
    "missing_required_parameter",
    "unknown_parameter",
}
_SHAPE |= {
    "unsupported_parameter",
    "misplaced_parameter",
    "body_too_complex",
    QueueFull.code,
    ShuttingDown.code,
}
DECLARED = (_codes(GuidedError) | _SHAPE) - {GuidedError.code, InternalError.code}
"""Error codes with a specific cause. `internal_error` has none."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    cause: str = ""
    """The error's code, or the problem with the output."""


def verdict_of(
    request: Request, answer: Answer, references: Mapping[str, Choice]
) -> Verdict:
    """Return the verdict on an answer. The outputs of hostile requests, and outputs
    that were cut, are not checked.

    Args:
        references: `Request.key` -> output of the same request without faults.
    """
    if answer.hung:
        return Verdict("hung", f"no end after {answer.ended - answer.began:.0f} s")
    if answer.problem is not None:
        return Verdict("undeclared", answer.problem)
    if answer.error is not None:
        return _of_error(answer.error, answer)
    if answer.left:
        return Verdict("left")
    if not answer.complete:
        return Verdict("undeclared", "a stream without an end")
    if request.hostile is not None:
        return Verdict("valid")
    if len(answer.choices) != request.body.get("n", 1):
        return Verdict("invalid", f"{len(answer.choices)} choices")
    if request.backend not in (None, "auto", answer.backend):
        return Verdict("invalid", f"{answer.backend} was used, not {request.backend}")
    reference = references.get(request.key or "")
    for choice in answer.choices.values():
        if choice.finish_reason not in ("stop", "length"):
            return Verdict("invalid", f"finish_reason {choice.finish_reason}")
        if (
            choice.finish_reason == "stop"
            and request.example
            and (wrong := _unsatisfied(request.example, choice.text))
        ):
            return Verdict("invalid", wrong)
        if reference is not None and choice != reference:
            return Verdict(
                "different",
                f"{choice.text[:200]!r}, without faults {reference.text[:200]!r}",
            )
    return Verdict("valid")


def _unsatisfied(example: Example, text: str) -> str | None:
    """Return why a whole output doesn't satisfy the constraint, or None."""
    if example.kind in ("json_schema", "json_object"):
        schema = example.value if example.kind == "json_schema" else {"type": "object"}
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"not valid: {text[:200]!r} ({str(error)[:200]})"
        return None
    fine = (
        text in example.value
        if example.kind == "choice"
        else re.fullmatch(example.pattern, text)
    )
    return None if fine else f"no {example.kind} {example.value!r}: {text[:200]!r}"


def _of_error(error: Mapping[str, Any], answer: Answer) -> Verdict:
    """Return the verdict on an error, which needs its fields, a specific code, and a
    time to retry if a retry helps."""
    if missing := {"message", "type", "param", "code"} - error.keys():
        return Verdict("undeclared", f"an error without {', '.join(sorted(missing))}")
    code, status = str(error["code"]), answer.status or 500
    if code not in DECLARED:
        return Verdict("undeclared", f"{status} {code}: {str(error['message'])[:200]}")
    if status in (429, 503) and "retry-after" not in answer.headers:
        return Verdict("undeclared", f"{status} {code} without retry-after")
    return Verdict("refused" if 400 <= status < 500 else "failed", code)


@dataclass(frozen=True)
class Record:
    """The result of one request. Times are `time.monotonic()`, in seconds."""

    request: Request
    began: float
    ended: float
    verdict: Verdict

    @property
    def is_lost(self) -> bool:
        """Whether the answer is an error."""
        return self.verdict.outcome in ("failed", "refused")

    def describe(self) -> str:
        request = self.request
        kind = (
            f"{request.example.kind}, {request.backend}"
            if request.example
            else request.hostile or "plain"
        )
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
        self,
        requests: Iterable[Request],
        concurrency: int,
        going_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send requests, `concurrency` at a time, while `going_on()` is true. Returns
        when all are answered."""
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
    """Send a request. If its client leaves, disconnect after some events of a stream or
    some time."""
    number = request.number
    if not request.leaves:
        return await ask(http, request.body, limit)
    if request.body.get("stream") and number % 2 == 0:
        return await ask(http, request.body, limit, leave_events=3 + number % 5)
    return await ask(
        http, request.body, limit, leave_seconds=LEAVE_SECONDS * (1 + number % 7) / 7
    )


async def reference_outputs(http: httpx.AsyncClient, limit: float) -> dict[str, Choice]:
    """Return the outputs of the repeated requests without faults: `Request.key` ->
    output.

    Each request is sent several times, in batches with others. Requests with different
    outputs are left out: rounding decides between two tokens.
    """
    found: dict[str, set[tuple[str, str | None]]] = {}
    slots = asyncio.Semaphore(8)

    async def record(request: Request) -> None:
        async with slots:
            answer = await _answer(http, request, limit)
        if verdict_of(request, answer, {}).outcome == "valid":
            choice = answer.choices[0]
            found.setdefault(request.key or "", set()).add(
                (choice.text, choice.finish_reason)
            )

    requests = repeated() * REFERENCES
    random.Random(0).shuffle(requests)
    await asyncio.gather(*map(record, requests))
    return {
        key: Choice(*outputs.pop())
        for key, outputs in found.items()
        if len(outputs) == 1
    }
