"""ASGI middleware that answers failed guided requests with an error:
`vllm serve --middleware guided.integrations.vllm.middleware.GuidedErrors`.

In vLLM, a logits processor can only make a request end with a stop token, as if its output was complete. The engine's
process reports the error out of band (`guided.integrations.vllm.error_reports`). The middleware gives each request
with a constraint in `vllm_xargs` an id of its own for that report, and changes its answer, on every route that takes
JSON:

- Not streamed: the answer is held back until it is complete, and replaced by an error if the request failed.
- Streamed: nothing is sent before the first piece of text, so a failure before it has its HTTP status too. A failure
  after it is sent as one event `data: {"error": ...}`, which ends the stream without `[DONE]`.

It writes objects in `vllm_xargs` as JSON text, because vLLM's server takes no objects there. Guided beam search is
rejected, because vLLM ignores `vllm_xargs` there. Other requests pass unchanged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from guided.constraint import KINDS
from guided.error_body import error_body, error_headers
from guided.errors import GuidedError, InvalidRequest, bounded
from guided.integrations.vllm.error_reports import REQUEST_ID, take
from guided.json_text import loads

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("guided.integrations")

_DONE = (b"data: [DONE]", b"event: response.completed")
"""Beginnings of the events that report a complete answer."""
_MAX_VALUES, _MAX_NESTING, _MAX_MEMBERS = 1_000_000, 256, 25_000
"""Limits of a request's body. A larger body is passed on unchanged; vLLM rejects its constraint, because the id is
missing."""
_INVALID_BODY = b"{"
"""Replaces the body of a request that is rejected here, so that vLLM rejects it too."""


class GuidedErrors:
    """The middleware.

    Args:
        app: the ASGI application, vLLM's server.
        take_error: returns the error that was reported for a request id, or None.
    """

    def __init__(self, app: ASGIApp, take_error: Callable[[str], GuidedError | None] = take) -> None:
        self._app = app
        self._take_error = take_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and _takes_json(scope):
            exchange = _Exchange(receive, send, self._take_error)
            await self._app(scope, exchange.receive, exchange.send)
        else:
            await self._app(scope, receive, send)


def _takes_json(scope: Scope) -> bool:
    content_type = dict(scope.get("headers", ())).get(b"content-type", b"")
    return not content_type or b"json" in content_type.lower()


def _identified(body: bytes) -> tuple[bytes, str] | None:
    """Add a request id to a guided request's body. Returns the new body and the id; None if it is not guided.

    Raises:
        InvalidRequest: vLLM would not mask the request.
    """
    # Saves most bodies from being parsed. The name can be escaped, or encoded as UTF-16 or 32, which contain zeros.
    if b"vllm_xargs" not in body and b"\\u" not in body and b"\0" not in body:
        return None
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        limits = {"max_values": _MAX_VALUES, "max_nesting": _MAX_NESTING, "max_members": _MAX_MEMBERS}
        request = loads(text, **limits, constants=True)
    except ValueError:
        return None  # vLLM rejects it
    extra = request.get("vllm_xargs") if isinstance(request, dict) else None
    if not isinstance(extra, dict) or extra.keys().isdisjoint(KINDS):
        return None
    if request.get("use_beam_search"):
        raise InvalidRequest(
            "use_beam_search can't be combined with a constraint: vLLM ignores vllm_xargs in beam search",
            param="use_beam_search",
        )
    label, request_id = extra.get(REQUEST_ID), uuid.uuid4().hex
    if label is not None:
        request_id += f" {bounded(repr(label))}"  # for the log
    extra |= {name: json.dumps(value) for name, value in extra.items() if isinstance(value, dict)}
    extra[REQUEST_ID] = request_id
    return json.dumps(request).encode(), request_id


class _Exchange:
    """The messages of one request and its answer. Changed only if the request is guided.

    The body is read when the application asks for it: vLLM checks API keys before that.
    """

    def __init__(self, receive: Receive, send: Send, take_error: Callable[[str], GuidedError | None]) -> None:
        self._receive = receive
        self._send = send
        self._take_error = take_error
        self._id: str | None = None
        """The id that errors are reported under. None: the request is not guided, or not read yet."""
        self._read = False
        self._rejection: GuidedError | None = None
        self._start: Message = {}
        self._is_stream = False
        self._started = False
        """The answer has begun: messages are sent as they come. Before that, they are held back."""
        self._held: list[Message] = []
        self._rest = b""
        """Incomplete event at the end of a stream's last message; the whole body so far of other answers."""
        self._failed = False
        self._ended = asyncio.Event()

    # the request

    async def receive(self) -> Message:
        """Return the body with a request id, then the client's disconnection. A failed answer counts as one."""
        if not self._read:
            self._read = True
            return await self._request_body()
        if self._id is None:
            return await self._receive()
        client, ended = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((client, ended), return_when=asyncio.FIRST_COMPLETED)
            return client.result() if client.done() else {"type": "http.disconnect"}
        finally:
            client.cancel()
            ended.cancel()

    async def _request_body(self) -> Message:
        parts, more = [], True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return {"type": "http.disconnect"}
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        try:
            found = _identified(body)
        except InvalidRequest as error:
            self._rejection, body = error, _INVALID_BODY
        else:
            if found is not None:  # Content-Length stays that of the client's body: nothing behind uvicorn reads it
                body, self._id = found
        return {"type": "http.request", "body": body, "more_body": False}

    # the answer

    async def send(self, message: Message) -> None:
        if self._failed:
            return
        if self._rejection is not None:
            self._failed, self._start = True, message
            await self._send_error(self._rejection)
        elif self._id is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = content_type.startswith(b"text/event-stream")
        elif message["type"] != "http.response.body":
            await self._send_or_hold(message)
        else:
            await self._body(bytes(message.get("body", b"")), message.get("more_body", False))

    async def _body(self, part: bytes, more: bool) -> None:
        body = self._rest + part
        *events, self._rest = body.split(b"\n\n") if self._is_stream else [body]
        for event in events:
            await self._event(event + b"\n\n")
            if self._failed:
                return
        if not more and not await self._fail():
            await self._release()
            await self._send({"type": "http.response.body", "body": self._rest, "more_body": False})

    async def _event(self, event: bytes) -> None:
        choices = _choices(event)
        is_last = event.startswith(_DONE) or any(choice.get("finish_reason") is not None for choice in choices)
        if is_last and await self._fail():
            return
        if not self._started and not (choices and all(map(_is_empty, choices))):
            await self._release()
        await self._send_or_hold({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_or_hold(self, message: Message) -> None:
        if self._started:
            await self._send(message)
        else:
            self._held.append(message)

    async def _release(self) -> None:
        """Send the held messages."""
        if not self._started:
            self._started = True
            for message in (self._start, *self._held):
                await self._send(message)
            self._held.clear()

    async def _fail(self) -> bool:
        """End the answer with the reported error, if there is one. Returns whether there is."""
        error = None if self._id is None else self._take_error(self._id)
        if error is None or self._start["status"] >= 400:  # a request that vLLM rejected has not run
            return False
        self._failed = True
        _log.error("request %s failed, %s: %s", self._id, error.code, error)
        if self._started:
            event = b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await self._send_error(error)
        self._ended.set()
        return True

    async def _send_error(self, error: GuidedError) -> None:
        body = json.dumps(error_body(error)).encode()
        own = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
        kept = [(name, value) for name, value in self._start["headers"] if not name.startswith(b"content-")]
        headers = [*kept, *((name.encode(), value.encode()) for name, value in own.items())]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _choices(event: bytes) -> list[dict[str, Any]]:
    """Return the choices in an event of a stream; an empty list for other events."""
    try:
        chunk = json.loads(event.removeprefix(b"data:"))
    except ValueError:
        return []
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _is_empty(choice: dict[str, Any]) -> bool:
    """Whether a choice has no text and no finish reason."""
    delta = choice.get("delta") or {}
    has_content = any(value for name, value in delta.items() if name != "role")
    return not has_content and not choice.get("text") and choice.get("finish_reason") is None
