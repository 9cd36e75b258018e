"""The HTTP application around one engine: its routes, error handlers, middleware and
documentation."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from engine.async_llm import AsyncLLM
from engine.server import metrics
from engine.server.api import (
    chat,
    completions,
    health,
    messages,
    models,
    ollama,
    responses,
)
from engine.server.api.routes import RouteResponses
from engine.server.context import ServerContext
from engine.server.metrics import Metrics
from engine.server.middleware import RequestChecks
from engine.server.options import ServerSettings
from engine.server.refusals import install_handlers
from engine.server.request.bodies import ErrorAnswer

DESCRIPTION = """
A server with guided decoding, for clients of OpenAI, Anthropic and Ollama. Add one of `json_schema`, `json_object`,
`regex`, `choice`, `grammar` and `structural_tag` to a request (or OpenAI's `response_format`, vLLM's
`structured_outputs`, the older `guided_*` names), and the output satisfies it. Chats may offer `tools`. `guided` in the
answer names the backend.
"""


_PAGE = Path(__file__).with_name("playground.html").read_text(encoding="utf-8")


def _source(tag: str) -> str:
    """Return the directive of the content security policy that allows the page's inline
    script or style."""
    element = re.search(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    assert element is not None
    digest = hashlib.sha256(element[1].encode()).digest()
    return f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'"


_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    f"img-src data:; {_source('script')}; {_source('style')}"
)


async def playground() -> HTMLResponse:
    """Return a page to try the server: one file that loads nothing from elsewhere. Its
    requests need the API key."""
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(_PAGE, headers=headers)


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Build the application. The caller shuts the engine down, after the application.

    The documentation pages bring their own scripts and styles and work without internet
    access.
    """
    # The middleware checks the key. This dependency makes the documentation page ask
    # for it.
    key = []
    if settings.api_keys:
        key.append(Depends(HTTPBearer(auto_error=False)))
    errors: RouteResponses = {
        "4XX": {"model": ErrorAnswer, "description": "The request is at fault."},
        "5XX": {
            "model": ErrorAnswer,
            "description": "The server is at fault, or busy (503).",
        },
    }
    app = FastAPIOffline(
        title="guided",
        version=version("guided"),
        description=DESCRIPTION,
        dependencies=key,
        responses=errors,
    )
    app.state.context = context = ServerContext(llm, settings, Metrics(llm))
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
    for routes in (
        chat,
        responses,
        messages,
        ollama,
        completions,
        models,
        health,
        metrics,
    ):
        app.include_router(routes.router)
    app.include_router(ollama.models)
    app.get("/", include_in_schema=False)(playground)
    app.include_router(models.tokenization)
    return app
