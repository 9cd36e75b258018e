"""LimitedProtocol: limits on the headers, the idle time and the number of connections,
which uvicorn does not have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.server.http_errors import RequestTimeout, TooManyConnections
from guided.errors import GuidedError, InvalidRequest, error_body, error_headers


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of `guided serve`. Ray Serve has its own HTTP proxy."""

    max_connections: int = 2048
    max_header_bytes: int = 16 << 10
    """Size of the URL and the headers together."""
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    """Clients and proxies close idle connections after 5 to 60 s. The server waits
    longer, because it could otherwise close a connection at the moment when the client
    sends a request."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, one instance per connection. The parser
    calls the methods `on_...`.

    Args:
        on_early_end: called with the reason when the server ends the connection early.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        on_early_end: Callable[[str], None],
        **uvicorn_arguments: Any,
    ) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._on_early_end = on_early_end
        self._timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Number of bytes received since the last complete header or piece of a
        body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self._limits.header_seconds)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(TooManyConnections("too many connections: try again"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self._limits.max_header_bytes:
            message = f"URL and headers have more than the limit of {self._limits.max_header_bytes} bytes"
            self._refuse(InvalidRequest(message, code="header_too_large", status=431))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(self._limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._expect(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else another request is in the pipeline
            self._expect(self._limits.idle_seconds)

    def _expect(self, seconds: float | None) -> None:
        """Give the client `seconds` to send a header; None means any time."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is None:
            self._timer = None
        else:
            self._timer = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if self._header_bytes > 0:
            self._refuse(RequestTimeout("the header of the request came too slowly"))
        elif not self.transport.is_closing():
            self._on_early_end("idle")
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser rejects. uvicorn calls this method."""
        self._refuse(InvalidRequest(msg))

    def _refuse(self, error: GuidedError) -> None:
        """Answer with an error and close the connection."""
        if self.transport.is_closing():
            return
        self._on_early_end(error.code)
        self._expect(None)
        if self.pipeline or (
            self.cycle
            and self.cycle.response_started
            and not self.cycle.response_complete
        ):
            self.transport.abort()  # another request's answer is under way
            return
        body = json.dumps(error_body(error)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(
            f"{name}: {text}\r\n"
            for name, text in (error_headers(error) | headers).items()
        )
        self.transport.write(
            STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body
        )
        self.transport.close()
