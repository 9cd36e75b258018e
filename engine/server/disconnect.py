"""Notice that a client goes away while its request waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive

from engine.server.generation import cancel

T = TypeVar("T")

_MOST_BYTES = 64 << 10
"""Maximum number of bytes of the body that are received meanwhile."""


class ClientGone(Exception):
    """The client has disconnected."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> tuple[T, Receive]:
    """Await `work`, and cancel it when the client disconnects. Raises `ClientGone` then.

    Returns the result, and a `receive` that begins with what arrived meanwhile: the first 64 KiB of the body. Beyond
    them, a disconnect is not noticed.
    """
    arrived: deque[Message] = deque()

    async def watch() -> None:
        size = 0
        while (message := await receive())["type"] != "http.disconnect":
            arrived.append(message)
            size += len(message.get("body", b""))
            if size >= _MOST_BYTES:
                await asyncio.Event().wait()  # the rest is received when the body is read

    async def receive_again() -> Message:
        return arrived.popleft() if arrived else await receive()

    task, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result(), receive_again
        raise ClientGone
    finally:
        await cancel([watching, task])
