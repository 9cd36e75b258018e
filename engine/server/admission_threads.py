"""AdmissionThreads: read bodies, and check them in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request

from engine.server.errors import QueueFull

_SMALL_BYTES = 64 << 10
"""A body up to this size is checked in hundredths of a second. Larger bodies have a thread of their own."""
_THREADS = 2
"""Number of threads for small bodies. Large bodies have one: it holds the interpreter lock most of the time, so that a
second one would slow the engine's thread and the event loop, and not check more."""
_LARGE_BODIES = 16
"""Maximum number of large bodies in memory. Of further ones, at most `_SMALL_BYTES` are read meanwhile."""

_NICE = 4
"""Priority of the thread for large bodies, as of nice(1). Parts of its work need no interpreter lock, and would take
the cores that the engine's thread and the event loop need. Higher than that of the actors: while it has the lock but no
core, those two wait."""

T = TypeVar("T")


def _lower_priority() -> None:
    with contextlib.suppress(PermissionError):  # the process has a lower one already
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class AdmissionThreads:
    """The threads that check bodies, with a limit on the bodies that wait for them.

    Clients take turns: a client that sends hundreds of small bodies delays another one by a few only, one that sends
    large bodies by one.

    Args:
        max_waiting: maximum number of small bodies that wait. A client within its share is let in beyond it, as in
            `ServerContext.admit`.
    """

    def __init__(self, max_waiting: int) -> None:
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="admission")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="admission-large", initializer=_lower_priority)
        self._places = asyncio.Semaphore(_LARGE_BODIES)
        self._max_waiting = max_waiting
        self._counts: Counter[str] = Counter()
        """Small bodies that wait or are checked, by client."""
        self._turns: dict[str, asyncio.Semaphore] = {}
        """By client: lets at most `_THREADS` of its small bodies into the threads' queue."""
        self._large_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By client: lets one of its large bodies into the thread's queue."""

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
            client = getattr(request.state, "client", "")
            if size > _SMALL_BYTES:
                async with self._large_turns.setdefault(client, asyncio.Lock()):
                    return await asyncio.get_running_loop().run_in_executor(self._large, work, body)
            async with self._turn(client):
                return await self.run_small(lambda: work(body))

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's turn. Raises `QueueFull` if too many wait."""
        own, total, limit = self._counts[client] + 1, self._counts.total() + 1, self._max_waiting
        if total > limit and (own > limit / len(self._counts.keys() | {client}) or total > 2 * limit):
            raise QueueFull(f"{total - 1} requests wait to be checked: try again")
        self._counts[client] += 1
        try:
            async with self._turns.setdefault(client, asyncio.Semaphore(_THREADS)):
                yield
        finally:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client], self._turns[client]

    def run_small(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread for small bodies."""
        return asyncio.get_running_loop().run_in_executor(self._small, work)
