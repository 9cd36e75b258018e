"""One server process, put together: socket, model, pool, application, signals; and taken apart again."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn
from transformers.utils.logging import disable_progress_bar

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.server.app import create_app
from engine.server.context import ServerContext, ServerSettings
from engine.server.defaults import sampling_defaults
from engine.server.protocol import CHAT_EXAMPLE, COMPLETION_EXAMPLE
from guided.limits import DEFAULT_LIMITS, CompileLimits, Limits

__all__ = ["DEFAULT_MODEL", "ServeOptions", "serve", "start_engine"]

_KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle: longer than clients and proxies keep theirs (5 to 60 s), because who closes first
may do so just when the other sends a request."""
DEFAULT_MODEL = "guided-default"
"""The name that the embedded model is served under."""


@dataclass(frozen=True)
class ServeOptions:
    """The command line of `guided serve`, and the arguments of the Ray Serve application.

    Args:
        model: local directory or hub name; None is the embedded model.
        parking, mask_deadline, mask_limit: see `EngineConfig`.
        max_replays, pool_wait, actor_memory_bytes, max_cache_bytes: see `actors.RayPool`.
        max_compiling, compile_limits: see there, too.
        max_waiting: see `ServerSettings`.
        limits, max_n, logits_processors: see `EngineConfig`.
        stall_seconds: see `ServerSettings`.
        grace_seconds: how long running generations may take to end by themselves once the server was told to stop.
    """

    model: str | None = None
    host: str = "127.0.0.1"
    pool: Literal["ray", "inline"] = "ray"
    ray_address: str | None = None
    num_actors: int | None = None
    backend: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_requests: int = 1024
    max_waiting: int = 512
    max_n: int | None = None
    limits: Limits = DEFAULT_LIMITS
    max_compiling: int = 256
    compile_limits: CompileLimits = field(default_factory=CompileLimits)
    parking: bool = True
    mask_deadline: float | None = None
    mask_limit: float = 5.0
    max_replays: int = 0
    pool_wait: float = 30.0
    actor_memory_bytes: int | None = None
    max_cache_bytes: int = 256 << 20
    device: str = "auto"
    dtype: str = "auto"
    logits_processors: tuple[str, ...] = ()
    api_key: str | None = None
    served_model_name: str | None = None
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0
    log_level: str = "info"

    @property
    def settings(self) -> ServerSettings:
        path = self.model or str(checkpoint_path())
        names = [self.served_model_name or self.model or DEFAULT_MODEL]
        return ServerSettings(
            model_names=tuple(names),
            api_key=self.api_key,
            backend=self.backend,
            max_requests=self.max_requests,
            max_waiting=self.max_waiting,
            stall_seconds=self.stall_seconds,
            sampling_defaults=sampling_defaults(path),
        )


def start_engine(options: ServeOptions) -> AsyncLLM:
    """Load the model, start the pool and the engine's thread. The caller shuts it down.

    Raises:
        OSError: there is no such model.
        UnsupportedModelError, GuidedError: it can't be served, the pool can't be started.
    """
    model = options.model or str(checkpoint_path())
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():  # hub names don't
        raise OSError(f"there is no model directory {model}")
    if not sys.stderr.isatty():
        disable_progress_bar()
    pool_options: dict[str, Any] = {}
    if options.pool == "ray":
        pool_options |= {
            "max_replays": options.max_replays,
            "pool_wait": options.pool_wait,
            "actor_memory_bytes": options.actor_memory_bytes,
            "max_cache_bytes": options.max_cache_bytes,
            "max_compiling": options.max_compiling,
            "compile_limits": options.compile_limits,
        }
        if options.ray_address is not None:
            pool_options["address"] = options.ray_address
        if options.num_actors is not None:
            pool_options["num_actors"] = options.num_actors
    return AsyncLLM(
        model,
        options.pool,
        EngineConfig(
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            parking=options.parking,
            mask_deadline=options.mask_deadline,
            mask_limit=options.mask_limit,
            limits=options.limits,
            max_n=options.max_n,
            logits_processors=options.logits_processors,
        ),
        pool_options=pool_options,
        device=options.device,
        dtype=options.dtype,
    )


def serve(options: ServeOptions, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM; leave no process behind.

    Raises:
        OSError: there is no such model.
        UnsupportedModelError, GuidedError: see `start_engine`.
    """
    _log_to_stderr(options.log_level)
    _drop_stalled_connections(listener, options.stall_seconds)
    with _signals_end_it():
        _say(options, "loading the model and starting the mask pool …")
        engine = start_engine(options)
        try:
            app = create_app(engine, options.settings)
            config = uvicorn.Config(
                app,
                log_level=options.log_level,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
            _Server(config, app.state.context, options).run(sockets=[listener])
        finally:
            engine.shutdown()


def _log_to_stderr(level: str) -> None:
    """What an operator is told, with its time; uvicorn and Ray see to their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("guided", "actors", "engine"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def _drop_stalled_connections(listener: socket.socket, seconds: float) -> None:
    """What was written to a client that doesn't take it is in the kernel's hands, and so is the connection: connections
    inherit this from the listener. Later than the stream's own limit, so that what ended it is known."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; counts closed windows too
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * seconds))


class _Server(uvicorn.Server):
    """Says what to try when it is up; lets running generations end when it is told to stop, then ends them."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, options: ServeOptions) -> None:
        super().__init__(config)
        self._context = context
        self._options = options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            _say(self._options, _greeting(f"http://{f'[{host}]' if ':' in host else host}:{port}", self._options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.shutting_down = True  # new requests and /health get 503
        deadline = time.monotonic() + self._options.grace_seconds
        while self._context.in_flight and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._context.engine.shutdown)  # streams that are left end with an error event
        await super().shutdown(sockets)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM unwinds the stack like SIGINT does, also before and after uvicorn has its own handlers."""

    def on_sigterm(number: int, frame: object) -> None:
        raise SystemExit(0)

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(options: ServeOptions, text: str) -> None:
    if options.log_level in ("debug", "info", "warning"):
        print(text, file=sys.stderr, flush=True)


def _greeting(url: str, options: ServeOptions) -> str:
    lines = ["", f"guided serves {options.settings.model_names[0]} on {url}", ""]
    if options.api_key is None and not _is_loopback(options.host):
        lines += [f"WARNING: everybody who can reach {options.host} can use it: set --api-key or GUIDED_API_KEY", ""]
    lines += ["Try:", "", _curl(url, options, "/v1/chat/completions", CHAT_EXAMPLE), ""]
    lines += [_curl(url, options, "/v1/completions", COMPLETION_EXAMPLE), ""]
    lines += [f"Documentation, to try from the browser:  {url}/docs", f"State of the mask pool:  curl {url}/health", ""]
    return "\n".join(lines)


def _curl(url: str, options: ServeOptions, path: str, body: dict[str, Any]) -> str:
    key = "" if options.api_key is None else " -H 'authorization: Bearer '\"$GUIDED_API_KEY\""
    return f"  curl -s {url}{path}{key} -H 'content-type: application/json' \\\n    -d {shlex.quote(json.dumps(body))}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
