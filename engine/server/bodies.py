"""Read the body of a request, in stages from cheap to expensive.

1. Size: the middleware counts the bytes (`middleware.py`).
2. JSON within limits: number of values, nesting, length of numbers, duplicate keys (`guided.json_text`).
3. Counts: messages, prompts, prompts times `n`.
4. Shape (`protocol.py`).
5. Meaning: the constraint, the sampling parameters, the prompt's tokens (`chat.py`, `completions.py`).

Stages 2 to 5 take time linear in the body's size, and run in a worker thread, never on the event loop. The last stage,
compilation, runs in processes that can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from engine.sampling_params import MAX_BIASES
from engine.server.context import ServerContext
from engine.server.errors import BodyTooComplex, InvalidJson, ShuttingDown, shape_error
from engine.server.protocol import WITHOUT_EFFECT
from guided.errors import InvalidRequest, bounded
from guided.json_text import JsonError, JsonTooLarge, loads

_NESTING = 256
"""Maximum nesting of a body: less than Python's stack, and more than a schema's, which has an error of its own."""
_MAX_VALUES = 200_000
"""Maximum number of values of a body: objects, arrays, strings, numbers, ..."""
_MAX_MEMBERS = 25_000
"""Maximum number of keys, objects and arrays of a body: parsing them holds the GIL, for a tenth of a second."""
_MAX_ENTRIES = {"logit_bias": MAX_BIASES, "vllm_xargs": 1024, "chat_template_kwargs": 1024}
_MAX_OUTPUTS = 256
"""Maximum number of outputs of a request: prompts times `n`."""


class BodyRoute(APIRoute):
    """A route for endpoints that are functions of `(body, request, context)` and run in a worker thread.

    The body has passed the stages 2 to 4. The endpoint returns the answer. The API documentation lists it like any
    other endpoint.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body_type = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            context: ServerContext = request.app.state.context

            def work(raw: bytes) -> Any:
                if context.shutting_down:
                    raise ShuttingDown("the server is shutting down")
                ignored = None if context.settings.strict_fields else list[str]()
                body = parse(raw, request.headers, body_type, context, ignored)
                request.state.ignored = ignored or []
                return self.prepare(body, request, context)

            try:
                async with context.room_for(request):
                    prepared = await context.in_thread(work, await request.body())
            except ClientDisconnect:
                context.metrics.abandoned("disconnected")
                return Response(status_code=499)
            return await self.respond(prepared, request, context)

        return handle

    def prepare(self, body: Any, request: Request, context: ServerContext) -> Any:
        """Call the endpoint. Runs in a worker thread."""
        context.check_model(body.model)
        return self.endpoint(body, request, context).model_dump_json()

    async def respond(self, prepared: Any, request: Request, context: ServerContext) -> Response:
        """Send what `prepare` returned. Runs on the event loop."""
        return Response(prepared, media_type="application/json")


def parse(
    raw: bytes,
    headers: Mapping[str, str],
    body_type: type[BaseModel],
    context: ServerContext,
    ignored: list[str] | None = None,
) -> BaseModel:
    """Take a body through the stages 2 to 4.

    `ignored` takes the names of fields that have no effect. None: unknown fields are rejected.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"content-encoding {bounded(encoding)} is not supported: send the body uncompressed")
    if not _is_json(headers.get("content-type", "")):
        raise InvalidRequest("the body must be a JSON object (content-type: application/json)")
    nesting = max(_NESTING, 2 * context.limits.max_nesting)
    try:
        data = loads(raw, max_values=_MAX_VALUES, max_nesting=nesting, max_members=_MAX_MEMBERS, constants=True)
    except JsonTooLarge as error:
        raise BodyTooComplex(f"the body is over a limit: {error}") from None
    except JsonError as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    if isinstance(data, dict):
        _check_counts(data, context)
    if ignored is not None and isinstance(data, dict):
        ignored += [name for name in WITHOUT_EFFECT if data.get(name) is not None]
    try:
        return body_type.model_validate(data, context={"ignored": ignored})
    except ValidationError as error:
        raise shape_error(error.errors(include_url=False, include_input=False)) from None


def _check_counts(data: Mapping[str, Any], context: ServerContext) -> None:
    """Check the lengths of lists and objects that cost time for each entry."""
    context_length = context.engine.max_model_len
    for name in ("messages", "input"):
        messages = data.get(name)
        if isinstance(messages, list) and len(messages) > context_length:
            message = f"there are {len(messages)} messages; the context of {context_length} tokens holds fewer"
            raise InvalidRequest(message, param=name)
    count = num_prompts(data.get("prompt"))
    limit = min(_MAX_OUTPUTS, context.settings.max_requests)
    for name in ("n", "best_of"):
        times = data.get(name)
        times = times if isinstance(times, int) and times > 1 else 1
        if count * times > limit:
            asked = f"{name} is {times}" if count == 1 else f"there are {count} prompts with {name} = {times}"
            raise InvalidRequest(
                f"{asked}; the limit of one request is {limit} outputs", param=name if count == 1 else "prompt"
            )
    for name, most in _MAX_ENTRIES.items():
        entries = data.get(name)
        if isinstance(entries, dict) and len(entries) > most:
            raise InvalidRequest(f"{name} has {len(entries)} entries; the limit is {most}", param=name)


def num_prompts(prompt: Any) -> int:
    """Return the number of prompts in a body's field: a list of token ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
