"""Connections: limits on how long and how much a client may send, and on the number of connections.

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
# Each of the following takes some microseconds of the event loop. Common clients stay far below the limits.
_MAX_HEADERS = 200
"""Maximum number of header lines of a request."""
_MAX_CHUNKS = 10_000
"""Maximum number of chunks of a body."""
_MAX_PIPELINED = 16
"""Maximum number of requests that a connection sends before they are answered."""


class Connections:
    """The connections of one server. `on_early_end` gets the reason when the server ends one early."""

    def __init__(self, limits: ConnectionLimits, on_early_end: Callable[[str], None]) -> None:
        self.limits = limits
        self.on_early_end = on_early_end
        self._waiting: dict[str, dict[LimitedProtocol, None]] = {}
        """Connections that wait for their client, by the client's address, the longest first."""
        self.count = 0
        self._most = min(limits.max_connections, _most_by_open_files())

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """The value of uvicorn's option `http`."""
        return cast(type[asyncio.Protocol], partial(LimitedProtocol, self))

    def add_waiting(self, connection: LimitedProtocol) -> None:
        """Note that a connection waits for its client from now on."""
        self._waiting.setdefault(connection.address, {})[connection] = None

    def remove_waiting(self, connection: LimitedProtocol) -> None:
        """Note that a connection waits no more. Idempotent."""
        of_address = self._waiting.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._waiting.pop(connection.address, None)

    def make_room(self) -> bool:
        """If there is one connection too many, end one that waits for its client: the one that has waited longest, of
        the address with most of those. Returns False if none waits."""
        if self.count <= self._most:
            return True
        if not self._waiting:
            return False
        of_address = max(self._waiting.values(), key=len)
        next(iter(of_address)).end("evicted")
        return True


def _most_by_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - len(list(Path("/proc/self/fd").iterdir())) - _RESERVED_FILES)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol within the limits of `Connections`. One instance per connection.

    The methods `on_...` are called by the parser.
    """

    def __init__(self, connections: Connections, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._connections = connections
        self._limits = connections.limits
        self.address = ""
        """The client's, without port."""
        self._timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._was_paused = False
        """The server itself had paused reading when the time for the body was over."""
        self._parse_error: GuidedError | None = None
        self._header_bytes = 0
        """Bytes received since the last header or piece of a body: an incomplete header, or what follows a body."""
        self._chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._connections.count += 1
        if self._connections.make_room():
            self._expect(self._limits.header_seconds, "header_timeout")
        else:
            self._refuse(TooManyConnections("too many connections: try again"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.count -= 1
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
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise self._refused(MalformedRequest(f"more than {_MAX_PIPELINED} requests wait for their answers"))
        super().on_message_begin()
        self._expect(self._limits.header_seconds, "header_timeout")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            raise self._refused(HeaderTooLarge(f"the request has more than {_MAX_HEADERS} header lines"))

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        self._chunks += 1
        if self._chunks > _MAX_CHUNKS:
            raise self._refused(MalformedRequest(f"the body has more than {_MAX_CHUNKS} chunks"))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            raise self._refused(self._header_too_large())
        self._in_body = True
        self._chunks = 0
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
            self._timer = self.loop.call_later(seconds, self.end, reason)
            self._connections.add_waiting(self)

    def _expect_nothing(self) -> None:
        self._connections.remove_waiting(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self, reason: str) -> None:
        """End the connection, because its client has sent too little for too long, or to make room for another."""
        if self._in_body and reason == "body_timeout" and (self.flow.read_paused or self._was_paused):
            self._was_paused = self.flow.read_paused
            self._expect(self._limits.body_seconds, reason)  # the client's time begins when the server reads again
            return
        begun = self._in_body or self._header_bytes > 0
        if begun and reason.endswith("_timeout"):
            seconds = self._limits.body_seconds if self._in_body else self._limits.header_seconds
            what = "body" if self._in_body else "header"
            self._refuse(RequestTimeout(f"the {what} of the request did not arrive within {seconds:g} s"), reason)
        else:
            self._connections.on_early_end(reason)
            self._expect_nothing()
            self.transport.abort()

    def _refused(self, error: GuidedError) -> GuidedError:
        """Return an error to raise in a method `on_...`: the parser stops, and `send_400_response` answers with it."""
        self._parse_error = error
        return error

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser rejects. uvicorn calls it."""
        self._refuse(self._parse_error or MalformedRequest(msg))

    def _refuse(self, error: GuidedError, reason: str | None = None) -> None:
        """Answer with an error and close the connection."""
        if self.transport.is_closing():
            return
        self._connections.on_early_end(reason or error.code)
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
