"""Gate: gives every request an id, a client and its turn, checks the host, the API key and the size of the body."""

from __future__ import annotations

import ipaddress
import secrets
import string
import time
import uuid
from contextlib import ExitStack

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.context import ServerContext
from engine.server.disconnect import ClientGone, unless_gone
from engine.server.errors import BodyTooLarge, HostNotAllowed, Unauthorized, log_refusal
from guided.error_body import error_body, error_headers
from guided.errors import GuidedError, bounded

HEALTH = "/health"
"""Requests for paths that begin with this do not wait for a turn (`ClientTurns`)."""
OPEN_PATHS = (HEALTH, "/metrics", "/version", "/docs", "/redoc", "/openapi.json", "/static-offline-docs")
"""Paths that need no key: probes and scrapers have none, and the documentation reveals nothing about the traffic. Nor
does the page at `/`."""

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=")


class Gate:
    """ASGI middleware. A client's own `x-request-id` is kept if it is short and plain.

    With several API keys each is a client of its own (`request.state.client`), else each address is.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context
        self.max_body_bytes = context.settings.max_body_bytes
        self._keys = [key.encode() for key in context.settings.api_keys]
        hosts = {name.lower() for name in context.settings.allowed_hosts}
        self._hosts = frozenset[str]() if "*" in hosts else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # No endpoint reads query or cookies. The framework would parse them: thousands take tens of milliseconds.
        scope["query_string"] = b""
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            await send(message)

        with ExitStack() as turn:  # ends with the request
            try:
                self._check_host(headers)
                key = self._check_key(scope, headers)
                self._check_length(headers)
                state["client"] = f"key {key}" if key is not None and len(self._keys) > 1 else _network(scope)
                receive = await self._take_turn(scope, receive, turn)
            except ClientGone:
                self.context.metrics.abandoned("disconnected")
                return
            except GuidedError as error:
                self.context.metrics.failed(error.code, error.status)
                log_refusal(scope, error.code, error.message, error.param)
                answer = JSONResponse(error_body(error), error.status, headers=error_headers(error))
                await answer(scope, receive, send_with_id)
                return
            await self.app(scope, self._limited(receive), send_with_id)

    async def _take_turn(self, scope: Scope, receive: Receive, turn: ExitStack) -> Receive:
        """Wait for the request's turn, which ends when `turn` is closed. Returns the `receive` that reads the body."""
        turns, client, path = self.context.turns, scope["state"]["client"], scope["path"]
        if path.startswith(HEALTH):
            return receive

        def begin() -> None:
            turn.callback(turns.leave, client, time.monotonic())

        async def wait() -> None:
            await turns.wait(client)
            begin()  # here, because a caller that is cancelled now does not learn that the wait is over

        if turns.enter(client, counts=scope["method"] == "POST"):
            begin()
        else:
            _, receive = await unless_gone(receive, wait())
        return receive

    def _check_host(self, headers: Headers) -> None:
        """Check the header Host: the name by which the client knows this server.

        A page in a browser can give its own name the address of this server (DNS rebinding). The browser then lets the
        page's scripts read the answers, but sends the page's name.
        """
        if not self._hosts:
            return
        given = headers.get("host", "")
        name = given.rpartition(":")[0] if not given.endswith("]") and ":" in given else given
        if name.lower() not in self._hosts:
            raise HostNotAllowed(
                f"this server does not answer for the host {bounded(given, 100)!r}: see --allowed-hosts"
            )

    def _check_key(self, scope: Scope, headers: Headers) -> int | None:
        """Return the index of the API key. None: the request has none and needs none."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        text = given.strip().encode()
        same = [secrets.compare_digest(text, key) for key in self._keys]  # all of them: the time reveals nothing
        if kind.lower() == "bearer" and True in same:
            return same.index(True)
        if self._keys and scope["path"] != "/" and not scope["path"].startswith(OPEN_PATHS):
            raise Unauthorized("Incorrect API key provided: send it as 'Authorization: Bearer KEY'")
        return None

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise BodyTooLarge(self._too_large)

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


def _network(scope: Scope) -> str:
    """Return the client's IPv4 address or IPv6 /64 network: a client has all addresses of such a network."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket, or a test
        return str(host)
    mapped = address.ipv4_mapped if address.version == 6 else None
    if address.version == 4 or mapped is not None:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))
