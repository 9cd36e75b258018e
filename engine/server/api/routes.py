"""BodyRoute: reads the body of a request, in stages from cheap to expensive.
JobResponse: runs the job of the request.

1. Size: the middleware counts the bytes (`middleware.py`).
2. JSON within limits: number of values, nesting, length of numbers, duplicate keys
   (`guided.json_text`).
3. Shape (`request/bodies.py`).
4. Meaning: the constraint, the number of outputs, the sampling parameters, the prompt's
   tokens.

Stages 2 to 4 run in a worker thread, because they may be slow. Compilation runs in
processes that can be killed. A stream that fails after its first event ends with
`Answer.failure` and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.outputs import RequestOutput
from engine.server.api.answers import Answer
from engine.server.context import ServerContext
from engine.server.http_errors import (
    OLLAMA_PATH,
    FieldNames,
    RequestTimeout,
    shape_error,
)
from engine.server.request.bodies import GuidedInfo
from engine.server.request.job import Job, Outputs, guided_info, outputs_of, report
from guided.errors import GuidedError, InternalError, InvalidConstraint, InvalidRequest
from guided.json_text import JsonError, JsonTooLarge, loads

logger = logging.getLogger("guided.server")

_BODY_LIMITS = {"max_values": 200_000, "max_nesting": 256, "max_members": 25_000}
"""Limits of a body. The nesting is below the depth of Python's stack, and above the
limit of a schema: that error is more specific. Parsing 25,000 members (keys, objects,
arrays) holds the GIL for a tenth of a second."""
_SMALL_BODY = 64 << 10
"""Size in bytes above which `ServerContext.large_bodies` limits how many bodies are
read at the same time. Chunked bodies count as large."""


class BodyRoute(APIRoute):
    """A route for endpoints that are functions of `(body, request, context)` and run in
    a worker thread.

    The body has passed stages 2 and 3. The endpoint returns a model or a response. The
    API documentation lists it like any other endpoint. `request.state.field_names` are
    the `FieldNames` of the request, to which endpoints add.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body_type = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            context: ServerContext = request.app.state.context

            def work(raw: bytes) -> Response:
                request.state.ignored = []
                body = parse(raw, request, body_type, context)
                context.check_model(body.model)
                answer = self.endpoint(body, request, context)
                if isinstance(answer, Response):
                    return answer
                return JSONResponse(answer.model_dump())

            context.check_room(1)
            request.state.field_names = FieldNames(extra_args="vllm_xargs")
            try:
                size = request.headers.get("content-length", "")
                is_small = size.isdecimal() and int(size) <= _SMALL_BODY
                async with nullcontext() if is_small else context.large_bodies:
                    raw = await _raw_body(request, context.settings.body_seconds)
                    return await context.in_thread(work, raw)
            except ClientDisconnect:
                context.client_left(request.state.request_id)
                return Response(status_code=499)

        return handle


async def _raw_body(request: Request, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError:
        raise RequestTimeout(
            f"the body of the request did not arrive within {seconds:g} s"
        ) from None


def parse(
    raw: bytes, request: Request, body_type: type[BaseModel], context: ServerContext
) -> Any:
    """Take a body through stages 2 and 3. `request.state.ignored` receives the names of
    fields that have no effect."""
    # Examples in Ollama's docs send no content type. Browsers send an origin, and must
    # not skip the preflight request.
    is_plain = (
        request.url.path.startswith(OLLAMA_PATH) and "origin" not in request.headers
    )
    content_type = (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
    )
    if content_type != "application/json" and not is_plain:
        raise InvalidRequest(
            "the body must be a JSON object (content-type: application/json)"
        )
    try:
        data = loads(raw, **_BODY_LIMITS, constants=True)
    except JsonTooLarge as error:
        raise InvalidRequest(
            f"the body is over a limit: {error}", code="body_too_complex"
        ) from None
    except JsonError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error}", code="invalid_json"
        ) from None
    try:
        if context.settings.strict_fields:
            ignored = None
        else:
            ignored = request.state.ignored
        return body_type.model_validate(
            data, context={"ignored": ignored, "names": request.state.field_names}
        )
    except ValidationError as error:
        raise shape_error(
            error.errors(include_url=False, include_input=False)
        ) from None


RouteResponses = dict[int | str, dict[str, Any]]
"""The type of the argument `responses` of routes, for the documentation page."""
_ANSWER = "An answer as the API's own documentation says, or its events (`stream`), plus `guided`: how it was made."
RESPONSES: RouteResponses = {
    200: {"description": _ANSWER, "content": {"text/event-stream": {}}}
}
"""The argument `responses` of routes that run a job."""


@dataclass(eq=False)
class JobResponse(Response):
    """Runs a job and sends its answer, or a stream. The job is aborted when the client
    disconnects."""

    _make_answer: Callable[[ServerContext, Job, GuidedInfo | None], Answer]
    _job: Job
    _request: Request
    _context: ServerContext
    _is_sent: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        state = self._request.state
        state.ignored += map(state.field_names.of, self._job.ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send the answer. Raises the error of a job that fails before
        the first byte of its answer."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.create_task(self._run(scope, receive, send))
        tasks = (work, asyncio.create_task(watch()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._is_sent or work.done():
                await work
            else:
                self._context.client_left(self._job.http_id)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job. If its constraint is refused, run `Job.relax` and try again."""
        context = self._context
        state = self._request.state
        relax = self._job.relax
        while True:
            job = self._job
            try:
                with context.admit(len(job.prompts) * job.params.width):
                    async with aclosing(outputs_of(context, job)) as outputs:
                        first = await anext(outputs)
                        guided = guided_info(job, first[1], state.field_names)
                        if state.ignored:
                            guided = (guided or GuidedInfo()).model_copy(
                                update={"ignored": state.ignored}
                            )
                        answer = self._make_answer(context, job, guided)
                        if job.stream:
                            headers = {
                                "cache-control": "no-cache",
                                "x-accel-buffering": "no",
                            }
                            events = self._events(_chained(first, outputs), answer)
                            await StreamingResponse(
                                events, 200, headers, answer.stream_type
                            ).stream_response(send)
                        else:
                            whole = await self._whole(_chained(first, outputs), answer)
                            await Response(whole, media_type="application/json")(
                                scope, receive, send
                            )
                        self._is_sent = True
                return
            except GuidedError as error:
                if not isinstance(error, InvalidConstraint) or relax is None:
                    report(job, error)
                    raise
                self._job = await context.in_thread(relax, error)

    async def _whole(self, outputs: Outputs, answer: Answer) -> bytes:
        """Return the body of an answer without `stream`."""
        last = {}
        async for number, output in outputs:
            last[number] = output
            if self._job.at_admission:
                break
        return await self._context.in_thread(
            answer.whole, [last[number] for number in sorted(last)]
        )

    async def _events(self, outputs: Outputs, answer: Answer) -> AsyncIterator[bytes]:
        """Write the whole stream, event by event."""
        finished = {}
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
            job = self._job
            if isinstance(raised, GuidedError):
                error: GuidedError = raised
                self._request.state.field_names.respell(error)
                report(job, error)
            else:
                error = InternalError(
                    "the server failed on this request; its log says why"
                )
                text = "request %s (x-request-id %s) failed"
                logger.exception(text, job.request_id, job.http_id, extra=job.log_ids)
            self._context.metrics.failed(error.code, error.status)
            yield answer.event(answer.failure(error))


async def _chained(first: tuple[int, RequestOutput], others: Outputs) -> Outputs:
    yield first
    async for output in others:
        yield output
