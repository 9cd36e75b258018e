"""RequestChecks: gives every request an id, and checks the header Host, the API key and
the size of the body."""

from __future__ import annotations

import re
import secrets
import uuid

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.context import ServerContext
from engine.server.refusals import refuse
from guided.errors import GuidedError, InvalidRequest, bounded
from guided.pools.protocol import CLIENT

OPEN_PATHS = (
    "/health",
    "/metrics",
    "/version",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/static-offline-docs",
)
"""Paths that need no key, besides `/`: probes and scrapers have no key, and the
documentation reveals nothing about the traffic."""

_PLAIN = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")


class RequestChecks:
    """ASGI middleware. A client's own `x-request-id` is kept if it is short and
    plain."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context
        names = "|".join(
            re.escape(name).replace(r"\*", ".*")
            for name in context.settings.allowed_hosts or ("*",)
        )
        self._host = re.compile(rf"({names})(:\d*)?", re.IGNORECASE)
        self._keys = [key.encode() for key in context.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = uuid.uuid4().hex
        if _PLAIN.fullmatch(given):
            request_id = given
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                # the names that OpenAI's and Anthropic's clients read
                for name in ("x-request-id", "request-id"):
                    answered.setdefault(name, request_id)
            await send(message)

        try:
            self._check_host(headers.get("host", ""))
            key = self._check_key(scope, headers)
        except GuidedError as error:
            await refuse(self.context.metrics, scope, error)(
                scope, receive, send_with_id
            )
            return
        CLIENT.set(key or str((scope.get("client") or ("",))[0]))
        await self.app(scope, self._limited(receive), send_with_id)

    def _check_host(self, given: str) -> None:
        """Refuse hosts that are not allowed, against DNS rebinding.

        With it, a page in a browser reaches this server under the name of the page's
        own host.
        """
        if self._host.fullmatch(given):
            return
        name = bounded(given, 100)
        message = (
            f"{name!r} in the header Host is not a name of this server: "
            "allow it with --allowed-hosts"
        )
        raise InvalidRequest(message, code="host_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        """Return the key of the client, or "" for a path that needs no key."""
        if (
            not self._keys
            or scope["path"] == "/"
            or scope["path"].startswith(OPEN_PATHS)
        ):
            return ""
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            text = headers.get("x-api-key", "")
        text = text.strip()
        # All keys are compared, so that the time reveals nothing.
        same = [secrets.compare_digest(text.encode(), key) for key in self._keys]
        if True not in same:
            message = "Incorrect API key provided: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise InvalidRequest(message, code="invalid_api_key", status=401)
        return text

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes of the body as they arrive."""
        total = 0
        limit = self.context.settings.max_body_bytes

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > limit:
                text = f"the body is larger than the limit of {limit} bytes"
                raise HTTPException(413, text, headers={"connection": "close"})
            return message

        return limited
