"""AdmissionThreads: read bodies, and check them in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from fastapi import Request

from engine.server.errors import QueueFull

_SMALL_BYTES = 64 << 10
"""A body of this size is checked in hundredths of a second. Larger ones have threads of their own."""
_THREADS = 2
"""Threads for small bodies, and as many for large ones."""
_LARGE_BODIES = 16
"""Maximum number of large bodies that are in memory. The connections of further ones are not read."""

T = TypeVar("T")


class AdmissionThreads:
    """The threads in which bodies are checked. At most `max_waiting` small bodies wait for them."""

    def __init__(self, max_waiting: int) -> None:
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="admission")
        self._large = ThreadPoolExecutor(_THREADS, thread_name_prefix="admission-large")
        self._places = asyncio.Semaphore(_LARGE_BODIES)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def run(self, request: Request, work: Callable[[bytes], T]) -> T:
        """Read the request's body and run `work` on it in a thread. Raises `QueueFull` or `ClientDisconnect`."""
        async with AsyncExitStack() as stack:
            chunks: list[bytes] = []
            size = 0
            async for chunk in request.stream():
                if size <= _SMALL_BYTES < size + len(chunk):
                    await stack.enter_async_context(self._places)
                size += len(chunk)
                chunks.append(chunk)
            body = b"".join(chunks)
            chunks.clear()
            if size > _SMALL_BYTES:
                return await asyncio.get_running_loop().run_in_executor(self._large, work, body)
            if self._waiting >= self._max_waiting:
                raise QueueFull(f"{self._waiting} requests wait to be checked: try again")
            self._waiting += 1
            try:
                return await self.run_small(lambda: work(body))
            finally:
                self._waiting -= 1

    def run_small(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread for small bodies."""
        return asyncio.get_running_loop().run_in_executor(self._small, work)
