"""The HTTP application: routes, errors, gate, documentation, around one engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline

from engine.async_llm import AsyncLLM
from engine.server import chat, completions, health, metrics, models, tokenization
from engine.server.context import ServerContext, ServerSettings
from engine.server.errors import install_handlers
from engine.server.gate import Gate
from engine.server.protocol import ErrorAnswer

__all__ = ["create_app"]

DESCRIPTION = """
An OpenAI-compatible server with guided decoding. Give a generation one of `json_schema`, `json_object`, `regex`,
`choice` and `grammar` (or OpenAI's `response_format`, vLLM's `structured_outputs`, the older `guided_*` names) and the
output satisfies it. `guided` in the answer says which backend enforced it.
"""


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The application. The engine is the caller's: shut it down after the application.

    The documentation pages carry their own scripts and styles, so that they work without a way to the internet.
    """
    # The gate checks the key; this only tells the documentation page to ask for it.
    key = [] if settings.api_key is None else [Depends(HTTPBearer(auto_error=False))]
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorAnswer, "description": "The request's fault, or too many of them (429)."},
        "5XX": {"model": ErrorAnswer, "description": "The server's fault; `x-should-retry` says whether to try again."},
    }
    app = FastAPIOffline(
        title="guided", version=version("guided"), description=DESCRIPTION, dependencies=key, responses=errors
    )
    app.state.context = ServerContext.build(engine, settings)
    app.add_middleware(Gate, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes)
    install_handlers(app)
    for routes in (chat, completions, tokenization, models, health, metrics):
        app.include_router(routes.router)
    return app
