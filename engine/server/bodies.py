"""Read the body of a request, in stages from cheap to expensive.

1. Size: the middleware counts the bytes (`middleware.py`).
2. JSON within limits: number of values, nesting, length of numbers, duplicate keys (`guided.json_text`).
3. Number of outputs.
4. Shape (`protocol.py`).
5. Meaning: the constraint, the sampling parameters, the prompt's tokens (`chat.py`, `completions.py`).

Stages 2 to 5 run in a worker thread, because they take time. Compilation runs in processes that can be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from engine.server.context import ServerContext
from engine.server.errors import BodyTooComplex, InvalidJson, RequestTimeout, shape_error
from guided.errors import GuidedError, InvalidRequest, bounded
from guided.json_text import JsonError, JsonTooLarge, loads

# Limits of a body. Its nesting is limited to less than Python's stack, and to more than a schema's, which has an error
# of its own. Parsing members (keys, objects and arrays) holds the GIL: the limit takes a tenth of a second.
_BODY_LIMITS = {"max_values": 200_000, "max_nesting": 256, "max_members": 25_000}


class BodyRoute(APIRoute):
    """A route for endpoints that are functions of `(body, request, context)` and run in a worker thread.

    The body has passed the stages 2 to 4. The endpoint returns the answer. The API documentation lists it like any
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
                raw = await _raw_body(request, context.settings.body_seconds)
                return await self.respond(await context.in_thread(work, raw), request, context)
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
    """Take a body through the stages 2 to 4. `ignored` takes the names of fields that have no effect."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"content-encoding {bounded(encoding)} is not supported: send the body uncompressed")
    if not _is_json(headers.get("content-type", "")):
        raise InvalidRequest("the body must be a JSON object (content-type: application/json)")
    try:
        data = loads(raw, **_BODY_LIMITS, constants=True)
    except JsonTooLarge as error:
        raise BodyTooComplex(f"the body is over a limit: {error}") from None
    except JsonError as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    if isinstance(data, dict):
        _check_outputs(data, context)
    try:
        return body_type.model_validate(data, context={"ignored": None if context.settings.strict_fields else ignored})
    except ValidationError as error:
        raise shape_error(error.errors(include_url=False, include_input=False)) from None


def _check_outputs(data: Mapping[str, Any], context: ServerContext) -> None:
    """Check the number of outputs."""
    count = num_prompts(data.get("prompt"))
    # Maximum number of outputs of a request: prompts times `n`.
    limit = min(256, context.settings.max_requests)
    for name in ("n", "best_of"):
        times = data.get(name)
        times = times if isinstance(times, int) and times > 1 else 1
        if count * times > limit:
            asked = f"{name} is {times}" if count == 1 else f"there are {count} prompts with {name} = {times}"
            raise InvalidRequest(
                f"{asked}; the limit of one request is {limit} outputs", param=name if count == 1 else "prompt"
            )


def num_prompts(prompt: Any) -> int:
    """Return the number of prompts in a body's field: a list of token ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
