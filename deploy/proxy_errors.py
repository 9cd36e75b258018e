"""Errors in OpenAI's shape for requests with a replica that has ended. Ray Serve's HTTP
proxies load this module with

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deploy.proxy_errors:middlewares

in the environment of every Ray node. Without it the proxy answers 500 with plain text,
or breaks the stream.
"""

from __future__ import annotations

import json

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guided.errors import InternalError, error_body, error_headers


class ReplicaDied(InternalError):
    code = "replica_died"
    status = 503
    retryable = True


def middlewares() -> list[Middleware]:
    """Return what Ray Serve adds to its HTTP proxies."""
    return [Middleware(_declare)]


def _declare(app: ASGIApp) -> ASGIApp:
    """Wrap the proxy's application, which returns without a complete answer if the
    replica has ended."""

    async def complete(scope: Scope, receive: Receive, send: Send) -> None:
        begun = ""
        is_complete = scope["type"] != "http"

        async def watch(message: Message) -> None:
            nonlocal begun, is_complete
            if message["type"] == "http.response.start":
                begun = dict(message["headers"]).get(b"content-type", b"-").decode()
            is_complete |= message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )
            await send(message)

        await app(scope, receive, watch)
        error = ReplicaDied(
            "the replica of this request has ended; send the request again"
        )
        if not is_complete and not begun:
            await JSONResponse(error_body(error), error.status, error_headers(error))(
                scope, receive, send
            )
        elif not is_complete and begun.startswith("text/event-stream"):
            event = f"data: {json.dumps(error_body(error))}\n\n"
            await send({"type": "http.response.body", "body": event.encode()})

    return complete
