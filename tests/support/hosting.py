"""The application on a real socket in this process, with access to its engine and pool,
and injected faults."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from faulty_pool import FaultyPool
from serving import wait_until

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.model.loader import LoadedModel
from engine.server.app import create_app
from engine.server.commands.serve import listener_on
from engine.server.connections import ConnectionLimits
from engine.server.context import ServerContext
from engine.server.options import ServeOptions, ServerSettings
from engine.server.process import drop_stalled_connections, uvicorn_config

WAIT = 60.0


@dataclass
class Hosted:
    """A running application."""

    engine: AsyncLLM
    pool: FaultyPool
    context: ServerContext
    url: str

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions", json={"prompt": "hello", **body}, timeout=WAIT
        )

    def connect(self, receive_buffer: int | None = None, **body: Any) -> socket.socket:
        """Send a request on a socket. The answer is not read."""
        host, port = self.url.removeprefix("http://").split(":")
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(WAIT)
        client.connect((host, int(port)))
        content = json.dumps({"prompt": "hello", **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        client.sendall(
            f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        )
        return client

    def metric(self, name: str, **labels: str) -> float:
        return self.context.metrics.registry.get_sample_value(name, labels) or 0.0

    def is_empty(self) -> bool:
        """Whether no request has left a group, block, matcher, or place in the
        queue."""
        engine, health = self.engine.engine, self.engine.health()
        return (
            not engine.groups
            and health.num_running
            == health.num_waiting
            == health.num_waiting_for_grammar
            == 0
            and engine.blocks.num_free == engine.blocks.num_blocks
            and self.context.in_flight == 0
            and self.pool.freed.issuperset(self.pool.opened)
        )

    def wait_empty(self) -> None:
        wait_until(self.is_empty, WAIT)


@contextlib.contextmanager
def hosted(
    model: LoadedModel,
    config: EngineConfig | None = None,
    limits: ConnectionLimits | None = None,
    unread_seconds: float = WAIT,
    **settings: Any,
) -> Iterator[Hosted]:
    """Serve `model` with a `FaultyPool` until the block ends. The sockets have small
    buffers."""
    pool = FaultyPool(model.vocabulary)
    engine = AsyncLLM(model, pool, config or EngineConfig(max_num_seqs=8))
    server_settings = ServerSettings(model_name="tiny", **settings)
    app = create_app(engine, server_settings)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown)
        stack.callback(engine.shutdown)
        listener = stack.enter_context(listener_on("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        drop_stalled_connections(listener, unread_seconds)
        server = uvicorn.Server(
            uvicorn_config(
                app,
                ServeOptions(),
                limits,
                log_config=None,
                log_level=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="uvicorn"
        )
        thread.start()
        try:
            wait_until(lambda: server.started, WAIT)
            host, port = listener.getsockname()[:2]
            yield Hosted(engine, pool, app.state.context, f"http://{host}:{port}")
        finally:
            server.should_exit = True
            thread.join(WAIT)


def read_to_the_end(client: socket.socket) -> str:
    """Read until the connection ends."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
            if received.endswith(b"0\r\n\r\n"):
                break
    return received.decode()


def events_in(response: str) -> list[str]:
    """The payloads of the events in a chunked response, in order."""
    return re.findall(r"^data: (.*)$", response, re.MULTILINE)
