"""What chat and text completions do alike: build the job, run it, and send an answer or a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request, Response

from engine.outputs import RequestOutput
from engine.server.answers import Answer
from engine.server.context import ServerContext
from engine.server.generation import Job, Outputs, cancel, running
from engine.server.protocol import GenerationRequest
from engine.server.streaming import EventStream, events
from guided.errors import GuidedError

logger = logging.getLogger("guided.server")

T = TypeVar("T")
Body = TypeVar("Body", bound=GenerationRequest)

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "An answer, or with `stream` its chunks.", "content": {"text/event-stream": {}}}
}
"""The routes' `responses`, for the documentation page."""


async def respond(
    body: Body,
    request: Request,
    context: ServerContext,
    build_job: Callable[[Body, ServerContext, str], Job],
    answer_type: type[Answer[Body]],
    field_names: Mapping[str, str],
) -> Response:
    """Answer a generation request.

    Args:
        build_job: checks everything that does not need the engine. It runs in a thread, because tokenizing and checking
            a schema take CPU time. Its last argument is the request's `x-request-id`.
        field_names: fields of the engine's errors, and what the endpoint calls them.

    Raises:
        GuidedError: the request was refused, or it failed before the first byte of the answer.
    """
    context.check_model(body.model)
    try:
        job = await asyncio.to_thread(build_job, body, context, request.state.request_id)
        async with AsyncExitStack() as stack:
            try:
                outputs = await _unless_gone(request, stack.enter_async_context(running(context, job)))
                answer = answer_type(context, body, job, outputs.guided)
                # The backend is in a header too, for clients that do not parse the body.
                headers = {} if outputs.guided is None else {"x-guided-backend": outputs.guided.backend}
                if body.stream:
                    content = events(outputs, answer, context.metrics)
                    return EventStream(content, stack.pop_all(), headers, context, job)
                finished = await _unless_gone(request, _finished(outputs))
            except _ClientGone:
                context.metrics.abandoned("disconnected")
                logger.info("request %s (x-request-id %s): the client went away", job.request_id, job.http_id)
                return Response(status_code=499)
            text = answer.whole(finished).model_dump_json()
            return Response(text, media_type="application/json", headers=headers)
    except GuidedError as error:
        error.param = field_names.get(error.param or "", error.param)
        raise


async def _finished(outputs: Outputs) -> list[RequestOutput]:
    """The last output of each prompt."""
    last: dict[int, RequestOutput] = {}
    async for number, output in outputs.stream:
        last[number] = output
    return [last[number] for number in sorted(last)]


class _ClientGone(Exception):
    """The client has disconnected."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects.

    Raises:
        _ClientGone: the client has disconnected.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientGone
    finally:
        await cancel([watch, task])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
