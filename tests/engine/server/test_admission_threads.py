"""AdmissionThreads: pauses, cancelled checks, places of large bodies. See also `tests/server/test_admission.py`."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fastapi import Request
from starlette.types import Message

from engine.server.admission_threads import AdmissionThreads

COMPUTED = 0.1
"""CPU seconds of a check."""


def request(client: str, size: int) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"a" * size, "more_body": False}

    return Request({"type": "http", "state": {"client": client}}, receive)


@pytest.mark.parametrize("size", [1_000, 200_000])
@pytest.mark.parametrize("has_others", [True, False])
def test_a_client_pauses_after_a_long_check_while_others_are_active(size: int, has_others: bool) -> None:
    began: list[tuple[str, float]] = []

    async def check() -> None:
        threads = AdmissionThreads(4, lambda client: has_others)

        def compute(client: str) -> None:
            began.append((client, time.monotonic()))
            until = time.thread_time() + COMPUTED
            while time.thread_time() < until:
                pass

        first = asyncio.create_task(threads.run(request("a", size), lambda _: compute("a")))
        second = asyncio.create_task(threads.run(request("a", size), lambda _: compute("a")))
        await first
        ended = time.monotonic()
        await threads.run(request("b", size), lambda _: compute("b"))
        await second
        times = {client: at - ended for client, at in began}
        assert (times["a"] >= 3 * COMPUTED) == has_others
        assert not has_others or times["b"] < times["a"]

    asyncio.run(check())


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_a_check_that_goes_on_after_its_request_was_cancelled_keeps_the_turn(size: int) -> None:
    async def check() -> None:
        threads, reached, free = AdmissionThreads(4, lambda client: False), threading.Event(), threading.Event()

        def wait(_: bytes) -> None:
            reached.set()
            assert free.wait(60)

        gone = asyncio.create_task(threads.run(request("a", size), wait))
        await asyncio.to_thread(reached.wait, 60)
        gone.cancel()
        following = asyncio.create_task(threads.run(request("a", size), len))
        await asyncio.sleep(0.1)
        assert not following.done()
        free.set()
        assert await following == size

    asyncio.run(check())


def test_a_client_with_many_large_bodies_leaves_places_to_others() -> None:
    async def check() -> None:
        threads, free = AdmissionThreads(4, lambda client: False), threading.Event()
        taken: list[str] = []

        def body(client: str) -> Request:
            async def receive() -> Message:
                taken.append(client)
                return {"type": "http.request", "body": b"a" * 50_000, "more_body": taken.count(client) % 4 != 0}

            return Request({"type": "http", "state": {"client": client}}, receive)

        def work(_: bytes) -> None:
            assert free.wait(60)

        tasks = [asyncio.create_task(threads.run(body("a"), work)) for _ in range(40)]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(threads.run(body("b"), work)))
        await asyncio.sleep(0.1)
        assert taken.count("b") == 4, "its body is read"
        for task in tasks:
            task.cancel()
        free.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())
