"""The server process: runs model, pool and application on a socket until a signal ends
it."""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import gc
import ipaddress
import json
import math
import os
import resource
import shlex
import signal
import socket
import sys
import time
from functools import cache, partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar
from uvicorn.config import LOGGING_CONFIG

from engine.async_llm import AsyncLLM
from engine.base_llm import default_pool
from engine.model.files import pretrained
from engine.server.app import create_app
from engine.server.connections import ConnectionLimits, LimitedProtocol
from engine.server.context import ServerContext
from engine.server.logs import JsonFormatter, log_to_stderr
from engine.server.options import ServeOptions, ServerSettings, check_names
from engine.server.request.bodies import CHAT_EXAMPLE
from guided.backends import AUTO
from guided.masks.resources import watch_free_memory

_EXIT_SECONDS = 8.0
"""Time after the grace period until the process ends, even if something still runs in
it."""

_OPEN_FILES = 65536
"""Limit of open files, if the system allows it. Each connection is an open file."""

_SWITCH_SECONDS = 0.0001
"""Time for which a thread keeps the interpreter lock while another thread waits for it.
The engine's thread takes the lock at each torch operation: beside a thread that checks
a large body, a step of 5 ms took 2.2 s with Python's default of 5 ms, and takes 0.06 s
with this value."""


def start_engine(options: ServeOptions) -> AsyncLLM:
    """Load the model, start the mask pool and the engine's thread. The caller shuts the
    engine down."""
    check_names(options)
    preload = options.ray.preload
    if options.server.backend != AUTO:
        preload = (*preload, options.server.backend)
    pool = options.pool
    if pool is None and options.ray.address is not None:
        pool = "ray"
    if not sys.stderr.isatty():
        disable_progress_bar()
    engine = AsyncLLM(
        options.model_path,
        pool or default_pool(),
        options.engine,
        pool_options=dataclasses.replace(options.ray, preload=preload),
        processor=options.post_processor,
        **dataclasses.asdict(options.load),
    )
    # These objects stay alive. A garbage collection that visited them would stop all
    # threads for tenths of a second.
    gc.collect()
    gc.freeze()
    watch_free_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    return engine


def settings_of(options: ServeOptions) -> ServerSettings:
    """Complete the settings of the HTTP application with the model's name and sampling
    defaults."""
    return dataclasses.replace(
        options.server,
        model_name=options.model_name,
        sampling_defaults=_sampling_defaults(options.model_path, options.load.revision),
    )


def _sampling_defaults(model: str, revision: str | None) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the checkpoint sets. `do_sample:
    false` means temperature 0."""
    try:
        config = GenerationConfig.from_pretrained(
            pretrained(model)[0], revision=revision
        )
    except OSError:
        return {}
    if config.do_sample is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {
        name: value
        for name in names
        if (value := getattr(config, name, None)) is not None
    }


def serve(options: ServeOptions, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM. Leaves no process behind. Raises
    what `start_engine` raises."""
    log_to_stderr(options.log_level, options.log_format)
    drop_stalled_connections(listener)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        limit = _OPEN_FILES
        if hard >= 0:
            limit = min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    # This handler unwinds the stack before uvicorn installs its own handler and after
    # uvicorn removes it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    _say(options, "loading the model and starting the mask pool …")
    engine = start_engine(options)
    try:
        settings = settings_of(options)
        if not settings.allowed_hosts and _is_loopback(options.host):
            settings = dataclasses.replace(
                settings,
                allowed_hosts=("localhost", "127.0.0.1", "[::1]", options.host),
            )
        app = create_app(engine, settings)
        # cached by FastAPI; building it later would block the event loop for half a
        # second
        app.openapi()
        config = uvicorn_config(app, options)
        _Server(config, app.state.context, options).run(sockets=[listener])
    finally:
        engine.shutdown()


def uvicorn_config(
    app: FastAPI,
    options: ServeOptions,
    limits: ConnectionLimits | None = None,
    **others: Any,
) -> uvicorn.Config:
    """Configure uvicorn for our application. `others` are further settings of
    uvicorn."""
    context: ServerContext = app.state.context
    limits = limits or ConnectionLimits()
    log_config = LOGGING_CONFIG
    if options.log_format == "json":
        as_json = {"()": JsonFormatter}
        log_config = {
            **LOGGING_CONFIG,
            "formatters": {"default": as_json, "access": as_json},
        }
    given: dict[str, Any] = {
        "http": partial(
            LimitedProtocol,
            limits,
            lambda reason: context.metrics.connection_ends.labels(reason).inc(),
        ),
        "ws": "none",
        "log_level": options.log_level,
        "log_config": log_config,
        "timeout_graceful_shutdown": 3,  # to send the last events of streams
        "timeout_keep_alive": math.ceil(limits.idle_seconds)
        + 1,  # the timeout of LimitedProtocol comes first
        "proxy_headers": False,
    }
    return uvicorn.Config(app, **{**given, **others})


def drop_stalled_connections(listener: socket.socket, seconds: float = 60.0) -> None:
    """Let the kernel drop connections to clients that read nothing for `seconds`.
    Connections inherit the setting."""
    # Linux only; it covers closed TCP windows too
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds)
        )


class _Server(uvicorn.Server):
    """Prints examples once it listens. After a signal, it waits for running
    generations, then aborts the rest."""

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, options: ServeOptions
    ) -> None:
        super().__init__(config)
        self._context = context
        self._options = options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            if ":" in host:
                host = f"[{host}]"
            url = f"http://{host}:{port}"
            _say(self._options, _greeting(url, self._options, self._context.llm))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _exit_in(self._options.grace_seconds + _EXIT_SECONDS)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.shutting_down = True  # new requests and /health get 503
        deadline = time.monotonic() + self._options.grace_seconds
        while (
            self._context.in_flight
            and not self.force_exit
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.05)
        # remaining streams end with an error event
        await asyncio.to_thread(self._context.llm.shutdown)
        await super().shutdown(sockets)


@cache  # only the first signal starts the time
def _exit_in(seconds: float) -> None:
    """End the process after `seconds` if it has not ended by itself, and print the
    stacks of all threads.

    This works even if threads hang or keep the GIL. The pool's cleanup process ends the
    processes that are left.
    """
    # see `cli.main`
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.dup(2))


def _say(options: ServeOptions, text: str) -> None:
    if (
        options.log_level in ("debug", "info", "warning")
        and options.log_format == "text"
    ):
        print(text, file=sys.stderr, flush=True)


def _greeting(url: str, options: ServeOptions, engine: AsyncLLM) -> str:
    model = engine.model
    pool = engine.pool.status()
    device = f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
    if model.device.type == "cpu" and options.load.device == "auto":
        device += " (no CUDA device was found)"
    masks = "this process, without isolation"
    if pool.name == "ray":
        masks = f"{len(pool.workers)} Ray actors"
    key = ""
    warning = ""
    if options.server.api_key:
        key = " -H 'authorization: Bearer '\"$GUIDED_API_KEY\""
    elif not _is_loopback(options.host):
        warning = f"WARNING: {options.host} takes requests without a key: set --api-key or GUIDED_API_KEY\n\n"
    return f"""
guided serves {options.model_name} on {url}
Model: {device}, context of {engine.max_model_len} tokens
Masks: {masks}

{warning}Try:

  curl -s {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
    -d {shlex.quote(json.dumps(CHAT_EXAMPLE))}

Playground, in a browser:  {url}/
Documentation, to try from the browser:  {url}/docs
"""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
