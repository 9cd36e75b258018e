"""Answers of Ray Serve's proxies for a replica that has ended. The proxy's application
is imitated: it returns without a complete answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving import sse
from starlette.types import Message, Receive, Scope, Send

from deploy.proxy_errors import middlewares

SSE = b"text/event-stream; charset=utf-8"


def begin(content_type: bytes) -> Message:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", content_type)],
    }


def piece(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


def answered(*messages: Message) -> list[Message]:
    """Return what the client gets if the proxy's application sends `messages` and
    returns."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    (middleware,) = middlewares()
    made: Any = middleware.cls(app, *middleware.args, **middleware.kwargs)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(made({"type": "http", "method": "POST", "path": "/"}, send, send))
    return sent


@pytest.mark.parametrize(
    "messages",
    [
        (begin(SSE), piece(b"data: 1\n\n"), piece(b"", False)),
        (begin(b"application/json"), piece(b"{}", False)),
        (
            begin(b"application/json"),
            piece(b'{"id": '),
        ),  # half of a JSON document cannot be mended
    ],
)
def test_complete_answers_and_broken_documents_pass(
    messages: tuple[Message, ...],
) -> None:
    assert answered(*messages) == list(messages)


def test_a_broken_answer_becomes_a_retryable_error() -> None:
    start, body = answered()
    headers = dict(start["headers"])
    assert (start["status"], headers[b"x-should-retry"], headers[b"retry-after"]) == (
        503,
        b"true",
        b"1",
    )
    *_, last = answered(begin(SSE), piece(b"data: 1\n\n"))
    (event,) = sse(last["body"].decode())
    assert {json.loads(body["body"])["error"]["code"], event["error"]["code"]} == {
        "replica_died"
    }
    assert not last.get("more_body")
