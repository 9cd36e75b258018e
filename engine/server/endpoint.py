"""GenerationRoute: runs the job of a chat, response or text completion, and sends an answer or server-sent events.

The status is sent before the first event. A failure after that is one event (`Answer.failure`), and the stream ends
without `[DONE]`. A slow client delays no other request: of its unread output only the newest snapshot is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from engine.outputs import RequestOutput
from engine.server.answers import Answer
from engine.server.bodies import BodyRoute
from engine.server.context import ServerContext
from engine.server.generation import Job, Outputs, cancel, report, running
from engine.server.protocol import GuidedInfo
from guided.errors import GuidedError, InternalError

logger = logging.getLogger("guided.server")

T = TypeVar("T")

Prepared = tuple[Callable[[ServerContext, Job, GuidedInfo | None], Answer], Job]
"""What an endpoint returns: how to make the answer, and the job."""

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An answer as OpenAI's API describes it, or with `stream` its chunks, plus `guided`: how the "
        "output was constrained.",
        "content": {"text/event-stream": {}},
    }
}
"""The routes' `responses`, for the documentation page."""


class GenerationRoute(BodyRoute):
    """A route for endpoints that return the request's `Job`. It runs the job and sends the answer, or a stream."""

    async def respond(self, answer: Prepared, request: Request, context: ServerContext) -> Response:
        """Run the job. Raises its error if it was refused, or failed before the first byte of the answer."""
        make_answer, job = answer
        async with AsyncExitStack() as stack:
            work = running(context, job, request.headers)
            guided, outputs = await _unless_gone(request, stack.enter_async_context(work))
            if ignored := request.state.ignored:
                guided = (guided or GuidedInfo()).model_copy(update={"ignored": ignored})
            writer = make_answer(context, job, guided)
            if job.stream:
                return _EventStream(_events(outputs, writer, request, context), stack.pop_all(), context, job)
            whole = await _unless_gone(request, self.whole(outputs, writer, context))
            return Response(whole, media_type="application/json")

    async def whole(self, outputs: Outputs, answer: Answer, context: ServerContext) -> bytes:
        """Return the body of an answer without `stream`."""
        last: dict[int, RequestOutput] = {}
        async for number, output in outputs:
            last[number] = output
        return await context.in_thread(answer.whole, [last[number] for number in sorted(last)])


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects. Raises `ClientDisconnect` then."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel([watching, task])


class _EventStream(StreamingResponse):
    """A response of events. It closes `resources` at the end, also if it never began."""

    def __init__(
        self, content: AsyncIterator[bytes], resources: AsyncExitStack, context: ServerContext, job: Job
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._resources = resources
        self._context = context
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        async with self._resources:
            await super().__call__(scope, receive, watched)
        if not complete:
            self._context.client_left(self._job.http_id)


async def _events(outputs: Outputs, answer: Answer, request: Request, context: ServerContext) -> AsyncIterator[bytes]:
    """Write the whole stream, event by event."""
    finished: dict[int, RequestOutput] = {}
    try:
        for data in answer.first_events():
            yield answer.event(data)
        async for number, output in outputs:
            for data in answer.new_events(number, output):
                yield answer.event(data)
            if output.finished:
                finished[number] = output
        for data in answer.last_events(list(finished.values())):
            yield answer.event(data)
        yield answer.end
    except Exception as raised:
        if isinstance(raised, GuidedError):
            error: GuidedError = raised
            error.param = request.state.field_names.get(error.param or "", error.param)
            report(answer.job, error, answer.guided)
        else:
            error = InternalError("the server failed on this request; its log says why")
            text, job = "request %s (x-request-id %s) failed", answer.job
            logger.exception(text, job.request_id, job.http_id, extra=job.log_ids)
        context.metrics.failed(error.code, error.status)
        yield answer.event(answer.failure(error))
