"""Send an answer piece by piece, or as server-sent events as OpenAI's clients read them.

The status is sent before the first event. A failure after that is one event (`Answer.failure`), and the stream ends
without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.outputs import RequestOutput
from engine.server.answers import Answer
from engine.server.context import ServerContext
from engine.server.generation import Job, Outputs, report
from engine.server.metrics import Metrics
from guided.errors import GuidedError, InternalError

logger = logging.getLogger("guided.server")

STALL_SECONDS = 60.0
"""Time for which a client may read nothing before its request is aborted."""
_PIECE_BYTES = 64 << 10


class AnswerStream(StreamingResponse):
    """A response that sends an answer in pieces, and closes `resources` at the end, also if it never began.

    A slow client delays no other request: of its unread output only the newest snapshot is kept. If it reads nothing
    for `STALL_SECONDS`, its request is aborted and the connection closed.
    """

    def __init__(
        self, content: AsyncIterator[bytes], resources: AsyncExitStack, context: ServerContext, job: Job
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream" if job.stream else "application/json", headers=headers)
        self._resources = resources
        self._context = context
        self._job = job
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = "disconnected"

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None
            self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        async with self._resources:
            try:
                await super().__call__(scope, receive, send_in_time)
            except _Stalled:
                reason = "stalled"
        if not self._complete:
            self._context.metrics.abandoned(reason)
            ids, extra = (self._job.request_id, self._job.http_id), self._job.log_ids
            if reason == "stalled":
                text = "request %s (x-request-id %s): the client took nothing for %g s"
                logger.warning(text, *ids, STALL_SECONDS, extra=extra)
            else:
                logger.info("request %s (x-request-id %s): the client went away", *ids, extra=extra)


class _Stalled(Exception):
    """The client has read nothing for too long."""


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    """Divide an answer: the client's time is limited for each piece."""
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


async def events(outputs: Outputs, answer: Answer, metrics: Metrics) -> AsyncIterator[bytes]:
    """Write the whole stream, event by event."""
    job = outputs.job
    finished: dict[int, RequestOutput] = {}
    try:
        for data in answer.first_events():
            yield answer.event(data)
        async for number, output in outputs.stream:
            for data in answer.new_events(number, output):
                yield answer.event(data)
            if output.finished:
                finished[number] = output
        for data in answer.last_events(list(finished.values())):
            yield answer.event(data)
        yield answer.end
    except GuidedError as error:
        metrics.failed(error.code, error.status)
        report(job, error, outputs.guided)
        yield answer.event(answer.failure(error))
    except Exception:
        metrics.failed(InternalError.code, InternalError.status)
        text = "request %s (x-request-id %s) failed"
        logger.exception(text, job.request_id, job.http_id, extra=job.log_ids)
        failure = InternalError("the server failed on this request; its log says why")
        yield answer.event(answer.failure(failure))
