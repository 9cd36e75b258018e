"""The HTTP application: routes, errors, checks, documentation, around one engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from engine.async_llm import AsyncLLM
from engine.server import chat, completions, health, metrics, models, playground, responses
from engine.server.context import ServerContext
from engine.server.errors import install_handlers
from engine.server.health import ReadinessCheck
from engine.server.metrics import Metrics
from engine.server.middleware import RequestChecks
from engine.server.options import ServerSettings
from engine.server.protocol import ErrorAnswer
from engine.server.tracing import Tracing

DESCRIPTION = """
An OpenAI-compatible server with guided decoding. Add one of `json_schema`, `json_object`, `regex`, `choice`,
`grammar` and `structural_tag` to a request (or OpenAI's `response_format`, vLLM's `structured_outputs`, the older
`guided_*` names), and the output satisfies it. Chats may offer `tools`. `guided` in the answer names the backend.
"""


def create_app(engine: AsyncLLM, settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """Build the application. The caller shuts the engine down, after the application.

    The documentation pages bring their own scripts and styles and work without internet access.
    """
    # The middleware checks the key. This makes the documentation page ask for it.
    key = [] if not settings.api_keys else [Depends(HTTPBearer(auto_error=False))]
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorAnswer, "description": "The request is at fault."},
        "5XX": {
            "model": ErrorAnswer,
            "description": "The server is at fault, or busy (503). `x-should-retry` says if a retry helps.",
        },
    }
    app = FastAPIOffline(
        title="guided", version=version("guided"), description=DESCRIPTION, dependencies=key, responses=errors
    )
    app.state.context = context = ServerContext(engine, settings, Metrics(engine), tracing)
    app.state.readiness = ReadinessCheck(context)
    app.add_middleware(RequestChecks, context=context)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-should-retry", "retry-after"],
        )
    install_handlers(app)
    for routes in (chat, responses, completions, models, health, metrics, playground):
        app.include_router(routes.router)
    app.include_router(chat.checks)
    app.include_router(models.tokenization)
    return app
