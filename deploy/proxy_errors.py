"""Declared errors for requests of a replica that has ended. For Ray Serve's HTTP proxies, which begin with

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deploy.proxy_errors:middlewares

in the environment of every Ray node. Without it the proxy answers 500 with plain text, or breaks the stream.
"""

from __future__ import annotations

import json

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ReplicaDied
from guided.error_body import error_body, error_headers


class ReplicaErrors:
    """ASGI middleware. The proxy's application (`app`) returns without a complete answer if the replica has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, complete = "", scope["type"] != "http"

        async def watch(message: Message) -> None:
            nonlocal begun, complete
            if message["type"] == "http.response.start":
                begun = dict(message["headers"]).get(b"content-type", b"-").decode()
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, watch)
        if complete:
            return
        error = ReplicaDied("the replica of this request has ended; send the request again")
        if not begun:
            await JSONResponse(error_body(error), error.status, error_headers(error))(scope, receive, send)
        elif begun.startswith("text/event-stream"):
            event = f"data: {json.dumps(error_body(error))}\n\n"
            await send({"type": "http.response.body", "body": event.encode()})


def middlewares() -> list[Middleware]:
    """Return what Ray Serve adds to its HTTP proxies."""
    return [Middleware(ReplicaErrors)]
