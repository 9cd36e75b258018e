"""The undisturbed reference: what requests that come again and again are answered with when nobody harms the server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.client import Choice, ask
from benchmarks.chaos.traffic import Request, Traffic

__all__ = ["undisturbed"]

AT_A_TIME = 16
LEAST_GAP = 0.01
"""Log-probability between the best two tokens. Below that, rounding may decide, which the rest of the batch changes."""


async def undisturbed(http: httpx.AsyncClient, judge: Judge, limit: float) -> dict[str, Choice]:
    """`Request.key` -> output.

    Raises:
        SystemExit: a request is not answered well though nobody does harm; says which.
    """
    found: dict[str, Choice] = {}
    slots = asyncio.Semaphore(AT_A_TIME)

    async def refer(request: Request) -> str | None:
        async with slots:
            answer = await ask(http, request, limit)
            verdict = judge.verdict(request, answer)
            if verdict.outcome != "valid":
                return f"undisturbed, and {verdict.outcome}: {verdict.cause}\n{request.body}"
            if request.key is not None and (request.example is not None or await _is_clear(http, request)):
                found[request.key] = answer.choices[0]
            return None

    problems = filter(None, await asyncio.gather(*(refer(request) for request in Traffic.repeated())))
    if text := "\n".join(problems):
        raise SystemExit(text)
    return found


async def _is_clear(http: httpx.AsyncClient, request: Request) -> bool:
    body: dict[str, Any] = {**request.body, "logprobs": True, "top_logprobs": 2}
    answer = (await http.post(request.path, json=body)).raise_for_status().json()
    tokens = answer["choices"][0]["logprobs"]["content"]
    gaps = [first["logprob"] - second["logprob"] for first, second in (each["top_logprobs"] for each in tokens)]
    return bool(min(gaps) >= LEAST_GAP)
