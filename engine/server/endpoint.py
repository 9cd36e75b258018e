"""GenerationRoute: runs the job of a chat, response or text completion, and sends an answer or a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from engine.outputs import RequestOutput
from engine.server.answers import Answer
from engine.server.bodies import BodyRoute
from engine.server.context import ServerContext
from engine.server.generation import Job, Outputs, cancel, running
from engine.server.protocol import GuidedInfo
from engine.server.streaming import AnswerStream, events, pieces
from guided.errors import GuidedError

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

    def prepare(self, body: Any, request: Request, context: ServerContext) -> Prepared:
        context.check_model(body.model)
        prepared: Prepared = self.endpoint(body, request, context)
        return prepared

    async def respond(self, prepared: Prepared, request: Request, context: ServerContext) -> Response:
        """Run the job. Raises its error if it was refused, or failed before the first byte of the answer."""
        make_answer, job = prepared
        async with AsyncExitStack() as stack:
            try:
                work = running(context, job, request.headers)
                outputs = await _unless_gone(request, stack.enter_async_context(work))
                guided = outputs.guided
                if ignored := request.state.ignored:
                    guided = (guided or GuidedInfo()).model_copy(update={"ignored": ignored})
                answer = make_answer(context, job, guided)
                content = await _unless_gone(request, self.content(outputs, answer, context))
            except ClientDisconnect:
                context.metrics.abandoned("disconnected")
                text = "request %s (x-request-id %s): the client went away"
                logger.info(text, job.request_id, job.http_id, extra=job.log_ids)
                return Response(status_code=499)
            return AnswerStream(content, stack.pop_all(), context, job)

    async def content(self, outputs: Outputs, answer: Answer, context: ServerContext) -> AsyncIterator[bytes]:
        """Return the answer's body in pieces."""
        if outputs.job.stream:
            return events(outputs, answer, context.metrics)
        return pieces(await context.in_thread(answer.whole, await _finished(outputs)))


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


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name the fields as the endpoint does."""
    try:
        yield
    except GuidedError as error:
        error.param = names.get(error.param or "", error.param)
        raise


async def _finished(outputs: Outputs) -> list[RequestOutput]:
    """Return the last output of each prompt."""
    last: dict[int, RequestOutput] = {}
    async for number, output in outputs.stream:
        last[number] = output
    return [last[number] for number in sorted(last)]
