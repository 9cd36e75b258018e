"""Gate: gives every request an id, checks the API key and the size of the body."""

from __future__ import annotations

import secrets
import string
import uuid

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import BodyTooLarge, Unauthorized
from guided.error_body import error_body, error_headers
from guided.errors import GuidedError

OPEN_PATHS = ("/health", "/metrics", "/version", "/docs", "/redoc", "/openapi.json", "/static-offline-docs")
"""Paths that need no key: probes and scrapers have none, and the documentation reveals nothing about the traffic."""

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=")


class Gate:
    """ASGI middleware. A client's own `x-request-id` is kept if it is short and plain."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            answer = JSONResponse(error_body(refusal), refusal.status, headers=error_headers(refusal))
            await answer(scope, receive, send_with_id)
        else:
            await self.app(scope, self._limited(receive), send_with_id)

    def _refusal(self, scope: Scope, headers: Headers) -> GuidedError | None:
        if self.api_key is not None and not scope["path"].startswith(OPEN_PATHS):
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not secrets.compare_digest(key.strip().encode(), self.api_key.encode()):
                return Unauthorized("Incorrect API key provided: send it as 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            return BodyTooLarge(self._too_large)
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes as they arrive, because a chunked body does not announce its size."""
        total = 0

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_body_bytes:
                raise HTTPException(413, self._too_large, headers={"connection": "close"})
            return message

        return limited

    @property
    def _too_large(self) -> str:
        return f"the body is larger than the limit of {self.max_body_bytes} bytes"


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and _ID_CHARACTERS.issuperset(given) else uuid.uuid4().hex
