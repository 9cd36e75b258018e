"""BodyRoute reads the body of a request, in stages from cheap to expensive. GenerationRoute then runs a job.

1. Size: the middleware counts the bytes (`middleware.py`).
2. JSON within limits: number of values, nesting, length of numbers, duplicate keys (`guided.json_text`).
3. Shape (`protocol.py`).
4. Meaning: the constraint, the number of outputs, the sampling parameters, the prompt's tokens.

Stages 2 to 4 run in a worker thread, because they take time. Compilation runs in processes that can be killed.
A stream that fails after its first event ends with `Answer.failure` and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, nullcontext
from typing import Any, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.outputs import RequestOutput
from engine.server.answers import Answer
from engine.server.context import ServerContext
from engine.server.errors import BodyTooComplex, InvalidJson, RequestTimeout, shape_error
from engine.server.generation import Job, Outputs, cancel, report, running
from engine.server.protocol import GuidedInfo
from guided.errors import GuidedError, InternalError, InvalidConstraint, InvalidRequest
from guided.json_text import JsonError, JsonTooLarge, loads

logger = logging.getLogger("guided.server")

T = TypeVar("T")

# Limits of a body. Its nesting is limited to less than Python's stack, and to more than a schema's, which has an error
# of its own. Parsing members (keys, objects and arrays) holds the GIL: the limit takes a tenth of a second.
_BODY_LIMITS = {"max_values": 200_000, "max_nesting": 256, "max_members": 25_000}
_SMALL_BODY = 64 << 10
"""Bytes. Larger bodies, and chunked ones, are read a limited number at a time (`ServerContext.large_bodies`)."""


class BodyRoute(APIRoute):
    """A route for endpoints that are functions of `(body, request, context)` and run in a worker thread.

    The body has passed the stages 2 and 3. The endpoint returns the answer. The API documentation lists it like any
    other endpoint. `request.state.field_names` has fields in errors -> their names in the request. Endpoints add to it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body_type = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            context: ServerContext = request.app.state.context

            def work(raw: bytes) -> Any:
                request.state.ignored = []
                body = parse(raw, request.headers, body_type, context, request.state.ignored)
                context.check_model(body.model)
                return self.endpoint(body, request, context)

            context.check_room(1)
            request.state.field_names = {"extra_args": "vllm_xargs"}
            try:
                size = request.headers.get("content-length", "")
                is_small = size.isdecimal() and int(size) <= _SMALL_BODY
                async with nullcontext() if is_small else context.large_bodies:
                    raw = await _raw_body(request, context.settings.body_seconds)
                    answer = await context.in_thread(work, raw)
                return await self.respond(answer, request, context)
            except ClientDisconnect:
                context.client_left(request.state.request_id)
                return Response(status_code=499)
            except GuidedError as error:
                error.param = request.state.field_names.get(error.param or "", error.param)
                raise

        return handle

    async def respond(self, answer: Any, request: Request, context: ServerContext) -> Response:
        """Send what the endpoint returned. Runs on the event loop."""
        return Response(await context.in_thread(answer.model_dump_json), media_type="application/json")


async def _raw_body(request: Request, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError:
        raise RequestTimeout(f"the body of the request did not arrive within {seconds:g} s") from None


def parse(
    raw: bytes, headers: Mapping[str, str], body_type: type[BaseModel], context: ServerContext, ignored: list[str]
) -> Any:
    """Take a body through the stages 2 and 3. `ignored` takes the names of fields that have no effect."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("the body must be a JSON object (content-type: application/json)")
    try:
        data = loads(raw, **_BODY_LIMITS, constants=True)
    except JsonTooLarge as error:
        raise BodyTooComplex(f"the body is over a limit: {error}") from None
    except JsonError as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    try:
        return body_type.model_validate(data, context={"ignored": None if context.settings.strict_fields else ignored})
    except ValidationError as error:
        raise shape_error(error.errors(include_url=False, include_input=False)) from None


Prepared = tuple[Callable[[ServerContext, Job, GuidedInfo | None], Answer], Job]
"""What an endpoint returns: how to make the answer, and the job."""

_ANSWER = "An answer as OpenAI or Anthropic describe it, or its events (`stream`), plus `guided`: how it was made."
RESPONSES: dict[int | str, dict[str, Any]] = {200: {"description": _ANSWER, "content": {"text/event-stream": {}}}}
"""The routes' `responses`, for the documentation page."""


class GenerationRoute(BodyRoute):
    """A route for endpoints that return the request's `Job`. It runs the job and sends the answer, or a stream."""

    async def respond(self, answer: Prepared, request: Request, context: ServerContext) -> Response:
        """Run the job. Raises its error if it was refused, or failed before the first byte of the answer."""
        make_answer, job = answer
        async with AsyncExitStack() as stack:
            while True:
                try:
                    guided, outputs = await _unless_gone(request, stack.enter_async_context(running(context, job)))
                    break
                except InvalidConstraint as error:
                    if job.relax is None:
                        raise
                    job = await context.in_thread(job.relax, error)
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
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)
        if not self._complete:
            self._context.client_left(self._job.http_id)

    async def stream_response(self, send: Send) -> None:
        await super().stream_response(send)
        self._complete = True


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
