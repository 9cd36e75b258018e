"""AdmissionThreads: bodies are checked in threads, large ones in threads of lower priority."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from fastapi import Request
from starlette.types import Message

from engine.server.admission_threads import AdmissionThreads


def priority(_: bytes) -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(("size", "is_lower"), [(1_000, False), (200_000, True)])
def test_threads_for_large_bodies_give_precedence_to_the_engine(size: int, is_lower: bool) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"a" * size, "more_body": False}

    async def check() -> int:
        threads = AdmissionThreads(max_waiting=4)
        return await threads.run(Request({"type": "http", "state": {}}, receive), priority)

    assert (asyncio.run(check()) > priority(b"")) == is_lower
