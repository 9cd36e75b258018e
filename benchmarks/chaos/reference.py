"""Reference outputs: the answers to repeated requests before the first fault."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.client import Choice, ask
from benchmarks.chaos.traffic import Request, Traffic

AT_A_TIME = 16
LEAST_GAP = 0.01
"""Minimum difference of the log-probabilities of the best two tokens. Below it the result may depend on rounding, which
varies with the batch."""


async def reference_outputs(http: httpx.AsyncClient, judge: Judge, limit: float) -> dict[str, Choice]:
    """Return the reference outputs: `Request.key` -> output.

    Raises:
        SystemExit: a request has no valid answer although there are no faults.
    """
    found: dict[str, Choice] = {}
    slots = asyncio.Semaphore(AT_A_TIME)

    async def record(request: Request) -> str | None:
        async with slots:
            answer = await ask(http, request, limit)
            verdict = judge.verdict(request, answer)
            if verdict.outcome != "valid":
                return f"without faults: {verdict.outcome}: {verdict.cause}\n{request.body}"
            if request.key is not None and (request.example is not None or await _is_clear(http, request)):
                found[request.key] = answer.choices[0]
            return None

    problems = filter(None, await asyncio.gather(*(record(request) for request in Traffic.repeated())))
    if text := "\n".join(problems):
        raise SystemExit(text)
    return found


async def _is_clear(http: httpx.AsyncClient, request: Request) -> bool:
    body: dict[str, Any] = {**request.body, "logprobs": True, "top_logprobs": 2}
    answer = (await http.post(request.path, json=body)).raise_for_status().json()
    tokens = answer["choices"][0]["logprobs"]["content"]
    gaps = [first["logprob"] - second["logprob"] for first, second in (each["top_logprobs"] for each in tokens)]
    return bool(min(gaps) >= LEAST_GAP)
