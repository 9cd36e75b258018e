"""AdmissionThreads: read bodies, and check them in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request

from engine.server.errors import QueueFull

_SMALL_BYTES = 64 << 10
"""A body up to this size is checked in tenths of a second. Larger bodies have a thread of their own."""
_SMALL_THREADS, _LARGE_THREADS = 2, 1
_LARGE_BODIES, _LARGE_BODIES_OF_CLIENT = 16, 4
"""Maximum number of large bodies in memory, of all clients and of one. Of further ones, at most `_SMALL_BYTES` are read
meanwhile."""
_PAUSE_FACTOR = 4.0
"""While other clients are active, a client's next body waits for this multiple of the CPU time of its last one, times
the number of clients with bodies here. So all together leave most of the time to the engine: its step is several times
slower while another thread computes in Python, because it waits for the interpreter lock after each torch operation."""
_MAX_PAUSE_SECONDS = 2.0
_UNPAUSED_SECONDS = 0.005
"""CPU time of a body that causes no pause: most bodies take less."""

T = TypeVar("T")


class AdmissionThreads:
    """The threads that check bodies, with a limit on the bodies that wait for them.

    Clients take turns: each has one small and one large body checked at a time, with pauses that leave most of the
    interpreter's time to the others.

    Args:
        max_waiting: maximum number of small bodies that wait. A client within its share is let in beyond it, as in
            `ServerContext.admit`.
        has_others: returns whether other clients than the given one are active.
    """

    def __init__(self, max_waiting: int, has_others: Callable[[str], bool]) -> None:
        self._small = _Threads(_SMALL_THREADS, "admission", has_others)
        self._large = _Threads(_LARGE_THREADS, "admission-large", has_others)
        self._places = asyncio.Semaphore(_LARGE_BODIES)
        self._places_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client."""
        self._max_waiting = max_waiting
        self._counts: Counter[str] = Counter()
        """Small bodies that wait or are checked, by client."""

    async def run(self, request: Request, work: Callable[[bytes], T]) -> T:
        """Read the request's body and run `work` on it in a thread. Raises `QueueFull` or `ClientDisconnect`."""
        client = getattr(request.state, "client", "")
        async with AsyncExitStack() as stack:
            chunks: list[bytes] = []
            size = 0
            async for chunk in request.stream():
                if size <= _SMALL_BYTES < size + len(chunk):
                    own = self._places_of.setdefault(client, asyncio.Semaphore(_LARGE_BODIES_OF_CLIENT))
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._places)
                size += len(chunk)
                chunks.append(chunk)
            body = b"".join(chunks)
            chunks.clear()
            if size > _SMALL_BYTES:
                return await self._large.run(client, lambda: work(body))
            with self._counted(client):
                return await self._small.run(client, lambda: work(body))

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        """Count a small body. Raises `QueueFull` if too many wait."""
        own, total, limit = self._counts[client] + 1, self._counts.total() + 1, self._max_waiting
        if total > limit and (own > limit / len(self._counts.keys() | {client}) or total > 2 * limit):
            raise QueueFull(f"{total - 1} requests wait to be checked: try again")
        self._counts[client] += 1
        try:
            yield
        finally:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def run_small(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread for small bodies."""
        return asyncio.wrap_future(self._small.submit(work))


class _Threads:
    """Threads in which each client has one body checked at a time."""

    def __init__(self, count: int, name: str, has_others: Callable[[str], bool]) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._has_others = has_others
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client. A semaphore exists while a body waits or is checked, and in the pause after it."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._executor.submit(work)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run `work` when it is the client's turn. The turn ends after the work, which cannot be cancelled, and the
        pause."""
        turn, loop = self._turns.setdefault(client, asyncio.Semaphore(1)), asyncio.get_running_loop()
        await turn.acquire()
        seconds = 0.0

        def measured() -> T:
            nonlocal seconds
            began = time.thread_time()
            try:
                return work()
            finally:
                seconds = time.thread_time() - began

        def end() -> None:
            pause = 0.0
            if seconds > _UNPAUSED_SECONDS and self._has_others(client):
                pause = min(_PAUSE_FACTOR * seconds * len(self._turns), _MAX_PAUSE_SECONDS)
            loop.call_later(pause, turn.release)

        def end_soon(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end)

        future = self.submit(measured)
        future.add_done_callback(end_soon)
        return await asyncio.wrap_future(future)
