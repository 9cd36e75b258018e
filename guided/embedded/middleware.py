"""`vllm serve --middleware guided.embedded.middleware.GuidedErrors`: what failed is answered with an error.

Within vLLM a logits processor can only end a request, and it ends `stop`, as if its output were complete. What became
of it is told out of band (`guided.embedded.statuses`), under a request id that is put into the request here: one of our
own, whatever the client's is, so that nobody is told of another's request. An answer to POST /v1/completions or
/v1/chat/completions with a guided parameter in `vllm_xargs` is looked at:

- Not streamed: it is kept until it is complete; an error with its HTTP status takes its place where the request failed.
- Streamed: nothing is sent before the first piece of text, so that what fails before it has an HTTP status too. Pieces
  of text are passed on as they come; what fails after the first is one event `data: {"error": ...}`, which ends the
  stream, without `[DONE]`.

What vLLM would answer without a look at `vllm_xargs` (beam search) is refused here.

Every other request, and its answer, passes untouched and unbuffered, but for the bodies sent to these two routes: they
are read to their end when vLLM asks for the first part.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from guided.constraint import KINDS
from guided.embedded.statuses import REQUEST_ID, take
from guided.error_body import error_body, error_headers
from guided.errors import GuidedError, InvalidRequest, bounded

__all__ = ["GuidedErrors"]

logger = logging.getLogger("guided.embedded")

DONE = b"data: [DONE]"
_NOTHING = b"{"
"""What the application is given in place of a request that is refused here: it can't but refuse it."""
PATHS = ("/v1/completions", "/v1/chat/completions")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Reported = Callable[[str], GuidedError | None]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class GuidedErrors:
    """The middleware: plain ASGI.

    Args:
        app: what answers.
        reported: what became of a request, by its id; None where nothing was reported.
    """

    def __init__(self, app: App, reported: Reported = take) -> None:
        self._app = app
        self._reported = reported

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(PATHS):
            request = _Request(receive)
            await self._app(scope, request.receive, _Answer(request, self._reported, send).send)
        else:
            await self._app(scope, receive, send)


async def _read(receive: Receive) -> bytes | None:
    """A request's body; None where the client went before it was sent."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _identified(body: bytes) -> tuple[bytes, str] | None:
    """A guided request's body with a request id in it, and that id; None where it isn't guided.

    Raises:
        InvalidRequest: nobody would mask it.
    """
    # The name may be written with escapes, and all of it in UTF-16 or 32, which have zeros.
    if b"vllm_xargs" not in body and b"\\u" not in body and b"\0" not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong with it
    extra = request.get("vllm_xargs") if isinstance(request, dict) else None
    if not isinstance(extra, dict) or extra.keys().isdisjoint(KINDS):
        return None
    if request.get("use_beam_search"):
        raise InvalidRequest(
            "use_beam_search can't be kept to a constraint: vLLM leaves vllm_xargs out there", param="use_beam_search"
        )
    label, request_id = extra.get(REQUEST_ID), uuid.uuid4().hex
    if label is not None:
        request_id += f" {bounded(repr(label))}"  # for the log
    extra[REQUEST_ID] = request_id
    return json.dumps(request).encode(), request_id


class _Request:
    """What the application receives: the body, read and marked when it asks for it; then that its client is gone.

    vLLM checks API keys before it reads a body, and so the body of who has none isn't read here either.
    """

    def __init__(self, receive: Receive) -> None:
        self.id: str | None = None
        """By which its end is reported; None where it isn't guided, or not read yet."""
        self.refusal: GuidedError | None = None
        """Why it isn't the application's to answer."""
        self._receive = receive
        self._read = False
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Tell the application that its client is gone: what it still generates is of no use to anybody."""
        self._ended.set()

    async def receive(self) -> Message:
        if not self._read:
            self._read = True
            return await self._first()
        if self.id is None:
            return await self._receive()
        client, ended = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((client, ended), return_when=asyncio.FIRST_COMPLETED)
            return client.result() if client.done() else {"type": "http.disconnect"}
        finally:
            client.cancel()
            ended.cancel()

    async def _first(self) -> Message:
        body = await _read(self._receive)
        if body is None:
            return {"type": "http.disconnect"}
        try:
            found = _identified(body)
        except InvalidRequest as error:
            self.refusal = error
            return {"type": "http.request", "body": _NOTHING, "more_body": False}
        if found is not None:  # Content-Length is that of what was sent: nobody behind uvicorn counts by it
            body, self.id = found
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """What is sent in answer to one request; as it comes where that isn't guided."""

    def __init__(self, request: _Request, reported: Reported, send: Send) -> None:
        self._request = request
        self._reported = reported
        self._send = send
        self._start: Message = {}
        self._streams = False
        self._started = False
        """What is sent goes out as it comes; until then it is kept."""
        self._kept: list[Message] = []
        self._rest = b""
        """Of a stream: an event that isn't complete yet."""
        self._failed = False

    async def send(self, message: Message) -> None:
        if self._failed:
            return
        if self._request.refusal is not None:
            self._failed = True
            self._start = message
            await self._send_error(self._request.refusal)
        elif self._request.id is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._streams = content_type.startswith(b"text/event-stream")
        elif message["type"] != "http.response.body":
            await self._pass(message)
        elif self._streams:
            await self._stream(bytes(message.get("body", b"")), message.get("more_body", False))
        else:
            self._kept.append(message)
            if not message.get("more_body", False) and not await self._fail():
                await self._release()

    async def _stream(self, part: bytes, more: bool) -> None:
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            await self._event(event + b"\n\n")
            if self._failed:
                return
        if not more and not await self._fail():
            await self._release()
            await self._send({"type": "http.response.body", "body": self._rest, "more_body": False})

    async def _event(self, event: bytes) -> None:
        choices = _choices(event)
        ends = event.startswith(DONE) or any(choice.get("finish_reason") is not None for choice in choices)
        if ends and await self._fail():
            return
        if not self._started and not (choices and all(map(_is_blank, choices))):
            await self._release()
        await self._pass({"type": "http.response.body", "body": event, "more_body": True})

    async def _pass(self, message: Message) -> None:
        if self._started:
            await self._send(message)
        else:
            self._kept.append(message)

    async def _release(self) -> None:
        if not self._started:
            self._started = True
            for message in (self._start, *self._kept):
                await self._send(message)
            self._kept.clear()

    async def _fail(self) -> bool:
        """Send the error that was reported, where one was; it is the end of the answer."""
        request_id = self._request.id
        error = None if request_id is None else self._reported(request_id)
        if error is None or self._start["status"] >= 400:  # what vLLM refused never ran
            return False
        self._failed = True
        logger.error("request %s failed, %s: %s", request_id, error.code, error)
        if self._started:
            event = b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await self._send_error(error)
        self._request.end()
        return True

    async def _send_error(self, error: GuidedError) -> None:
        body = json.dumps(error_body(error)).encode()
        fresh = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
        kept = [(name, value) for name, value in self._start["headers"] if not name.startswith(b"content-")]
        headers = [*kept, *((name.encode(), value.encode()) for name, value in fresh.items())]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _choices(event: bytes) -> list[dict[str, Any]]:
    """The choices of a stream's event; none where it is no chunk of an answer."""
    try:
        chunk = json.loads(event.removeprefix(b"data:"))
    except ValueError:
        return []
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _is_blank(choice: dict[str, Any]) -> bool:
    """It has no text, and isn't the end."""
    delta = choice.get("delta") or {}
    said = any(value for name, value in delta.items() if name != "role")
    return not said and not choice.get("text") and choice.get("finish_reason") is None
