"""AdmissionThreads: the pause after a body that took long to check. `tests/server/test_admission.py` has the rest."""

from __future__ import annotations

import asyncio
import time

import pytest
from fastapi import Request
from starlette.types import Message

from engine.server.admission_threads import AdmissionThreads

COMPUTED = 0.1
"""CPU seconds of a check."""


@pytest.mark.parametrize("size", [1_000, 200_000])
@pytest.mark.parametrize("has_others", [True, False])
def test_a_client_pauses_after_a_long_check_while_others_are_active(size: int, has_others: bool) -> None:
    began: list[tuple[str, float]] = []

    def request(client: str) -> Request:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"a" * size, "more_body": False}

        return Request({"type": "http", "state": {"client": client}}, receive)

    async def check() -> None:
        threads = AdmissionThreads(4, lambda client: has_others)

        def compute(client: str) -> None:
            began.append((client, time.monotonic()))
            until = time.thread_time() + COMPUTED
            while time.thread_time() < until:
                pass

        first = asyncio.create_task(threads.run(request("a"), lambda _: compute("a")))
        second = asyncio.create_task(threads.run(request("a"), lambda _: compute("a")))
        await first
        ended = time.monotonic()
        await threads.run(request("b"), lambda _: compute("b"))
        await second
        times = {client: at - ended for client, at in began}
        assert (times["a"] >= 3 * COMPUTED) == has_others
        assert not has_others or times["b"] < times["a"]

    asyncio.run(check())
