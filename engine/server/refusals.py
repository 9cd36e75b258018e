"""The handlers of errors: count and log each error, and answer in the shape that
clients of the path expect."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from engine.server.http_errors import (
    MESSAGES_PATH,
    OLLAMA_PATH,
    RequestTimeout,
    message_error,
    ollama_error,
)
from engine.server.metrics import Metrics
from guided.errors import (
    CompileTimeout,
    GuidedError,
    InternalError,
    InvalidRequest,
    bounded,
    error_body,
    error_headers,
)

logger = logging.getLogger("guided.server")

_BODIES = {MESSAGES_PATH: message_error, OLLAMA_PATH: ollama_error}
"""Beginning of a path -> the function that makes the bodies of errors. Other paths use
`error_body`."""


def install_handlers(app: FastAPI) -> None:
    """Install the handlers of all errors in an application."""
    app.add_exception_handler(GuidedError, _on_guided_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


def refuse(
    metrics: Metrics, scope: Scope, error: GuidedError, **headers: str
) -> JSONResponse:
    """Count and log an error, and return the answer. `headers` are added to the headers
    of the answer."""
    if names := scope.get("state", {}).get("field_names"):
        names.respell(error)
    metrics.failed(error.code, error.status)
    # other errors are logged where they happen
    if error.status < 500 and not isinstance(error, CompileTimeout):
        _log(scope, error)
    body_of = next(
        (make for begin, make in _BODIES.items() if scope["path"].startswith(begin)),
        error_body,
    )
    return JSONResponse(body_of(error), error.status, error_headers(error) | headers)


async def _on_guided_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GuidedError)
    headers = {}
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"  # the rest of the body is not read
    return refuse(request.app.state.context.metrics, request.scope, error, **headers)


async def _on_http_exception(request: Request, raised: Exception) -> JSONResponse:
    assert isinstance(raised, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    message = bounded(raised.detail)
    if raised.status_code == 404:
        message = _hint(request)
    error = InvalidRequest(
        message, code=codes.get(raised.status_code, ""), status=raised.status_code
    )
    return refuse(
        request.app.state.context.metrics,
        request.scope,
        error,
        **(raised.headers or {}),
    )


def _log(scope: Scope, error: GuidedError) -> None:
    """Log why a request is refused."""
    request_id = scope.get("state", {}).get("request_id", "-")
    message = error.message
    if error.param is not None:
        message = f"{error.param}: {message}"
    text = " ".join(message.split())
    where = f"{scope['method']} {bounded(scope['path'], 100)!r}"
    extra = {"x_request_id": request_id, "code": error.code}
    logger.info(
        "x-request-id %s: %s refused: %s: %s",
        request_id,
        where,
        error.code,
        bounded(text),
        extra=extra,
    )


def _hint(request: Request) -> str:
    """Return what to do about an unknown path."""
    # request.url would contain the header Host, which may be anything
    path = request.scope["path"]
    if path.startswith(f"/v1{MESSAGES_PATH}"):
        return f"there is no {bounded(path, 100)!r}: the base URL of Anthropic's clients ends without /v1"
    prefixed = {**request.scope, "path": f"/v1{path}"}
    if any(
        route.matches(prefixed)[0] is not Match.NONE for route in request.app.routes
    ):
        return f"there is no {path}: send the request to /v1{path} (a client's base URL ends with /v1)"
    return f"there is no {bounded(path, 100)!r}: requests go to /v1/chat/completions, and /docs lists all paths"


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again after this answer, outside of our middleware. The
    # server then logs the traceback.
    request_id = request.scope.get("state", {}).get("request_id", "-")
    text = "x-request-id %s: %s %s failed: %r"
    extra = {"x_request_id": request_id}
    logger.error(
        text,
        request_id,
        request.method,
        bounded(request.scope["path"], 100),
        error,
        extra=extra,
    )
    internal = InternalError("the server failed on this request; its log says why")
    return refuse(
        request.app.state.context.metrics,
        request.scope,
        internal,
        **{"x-request-id": request_id},
    )
