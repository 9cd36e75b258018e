"""LimitedProtocol: limits on how long and how much a client may send on a connection, and on the number of connections.

uvicorn itself limits neither headers nor silent connections, so its protocol is extended here. `docs/design.md`
compares it with the servers that have such limits.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.server.errors import HeaderTooLarge, MalformedRequest, RequestTimeout, TooManyConnections
from engine.server.options import ConnectionLimits
from guided.error_body import error_body, error_headers
from guided.errors import GuidedError

_RESERVED_FILES = 128
"""File descriptors for everything but clients: sockets of the pool, shared memory, pipes, files of the model."""


def limited_protocol(limits: ConnectionLimits, on_early_end: Callable[[str], None]) -> type[asyncio.Protocol]:
    """Return the value of uvicorn's option `http`.

    Args:
        on_early_end: gets the reason when the server ends a connection early.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(1, soft - len(list(Path("/proc/self/fd").iterdir())) - _RESERVED_FILES)
    most = min(limits.max_connections, files)
    return cast(type[asyncio.Protocol], partial(LimitedProtocol, limits, most, on_early_end))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. One instance per connection. The parser calls the methods `on_...`."""

    def __init__(
        self, limits: ConnectionLimits, most: int, on_early_end: Callable[[str], None], **uvicorn_arguments: Any
    ) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._most = most
        self._on_early_end = on_early_end
        self._timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._parse_error: GuidedError | None = None
        self._header_bytes = 0
        """Bytes received since the last header or piece of a body: an incomplete header, or what follows a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse(TooManyConnections("too many connections: try again"))
        else:
            self._expect(self._limits.header_seconds, "header_timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self._limits.max_header_bytes:
            self._refuse(self._header_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(self._limits.header_seconds, "header_timeout")

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._parse_error = self._header_too_large()
            raise self._parse_error  # the parser stops, and calls `send_400_response`
        self._in_body = True
        self._header_bytes = 0
        self._expect(self._limits.body_seconds, "body_timeout")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._expect_next_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_body:
            self._expect_next_request()

    def _expect_next_request(self) -> None:
        """Wait for the client if the server has answered everything."""
        if self.cycle.response_complete:
            self._expect(self._limits.idle_seconds, "idle")
        else:
            self._expect_nothing()

    def _expect(self, seconds: float, reason: str) -> None:
        """Wait for the client, and end the connection with `reason` after `seconds`."""
        self._expect_nothing()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self._end, reason)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, reason: str) -> None:
        """End the connection, because its client has sent too little for too long."""
        if self._in_body and self.flow.read_paused:  # the server does not read: the client could not send more
            self._expect(self._limits.body_seconds, reason)
        elif self._in_body or self._header_bytes > 0:
            seconds = self._limits.body_seconds if self._in_body else self._limits.header_seconds
            what = "body" if self._in_body else "header"
            self._refuse(RequestTimeout(f"the {what} of the request did not arrive within {seconds:g} s"), reason)
        else:
            self._on_early_end(reason)
            self._expect_nothing()
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser rejects. uvicorn calls it."""
        self._refuse(self._parse_error or MalformedRequest(msg))

    def _refuse(self, error: GuidedError, reason: str | None = None) -> None:
        """Answer with an error and close the connection."""
        if self.transport.is_closing():
            return
        self._on_early_end(reason or error.code)
        self._expect_nothing()
        cycle = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.abort()  # another request's answer is under way
            return
        body = json.dumps(error_body(error)).encode()
        headers = {
            **error_headers(error),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()

    def _header_too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(f"URL and headers have more than the limit of {self._limits.max_header_bytes} bytes")
