"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, plus `pointer`.

`pointer` is an RFC 6901 JSON pointer into the schema, else null. OpenAI's clients obey the header `x-should-retry`: it
says whether the same request would probably succeed (`GuidedError.retryable`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from engine.server.protocol import MISPLACED, REFUSED, UNSUPPORTED
from guided.error_body import envelope, error_body, error_headers
from guided.errors import CompileTimeout, GuidedError, InternalError, InvalidRequest, bounded

logger = logging.getLogger("guided.server")


class Unauthorized(InvalidRequest):
    code = "invalid_api_key"
    status = 401


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    status = 404


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class BodyTooComplex(InvalidRequest):
    code = "body_too_complex"


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class HeaderTooLarge(InvalidRequest):
    code = "header_too_large"
    status = 431


class HostNotAllowed(InvalidRequest):
    code = "host_not_allowed"


class MalformedRequest(InvalidRequest):
    code = "malformed_request"


class RequestTimeout(InvalidRequest):
    code = "request_timeout"
    status = 408
    retryable = True


class TooManyConnections(InternalError):
    code = "too_many_connections"
    status = 503
    retryable = True


class QueueFull(GuidedError):
    code = "queue_full"
    status = 503
    retryable = True


class ShuttingDown(InternalError):
    code = "shutting_down"
    status = 503
    retryable = True


class ReplicaDied(InternalError):
    code = "replica_died"
    status = 503
    retryable = True


def install_handlers(app: FastAPI) -> None:
    """Answer every error of the application in this shape."""
    app.add_exception_handler(GuidedError, _on_guided_error)
    app.add_exception_handler(RequestValidationError, _on_shape_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_guided_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GuidedError)
    request.app.state.context.metrics.failed(error.code, error.status)
    if error.status < 500 and not isinstance(error, CompileTimeout):  # those are logged where they happen
        log_refusal(request.scope, error.code, error.message, error.param)
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


async def _on_shape_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param, code = _describe(error.errors())
    request.app.state.context.metrics.failed(code, 400)
    log_refusal(request.scope, code, message, param)
    return JSONResponse(envelope(400, message, param, code), 400, headers={"x-should-retry": "false"})


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {"x-should-retry": "false", **(error.headers or {})}
    code = {404: "not_found", 405: "method_not_allowed", 413: BodyTooLarge.code}.get(
        error.status_code, "invalid_request"
    )
    message = _hint(request) if code == "not_found" else bounded(error.detail)
    body = envelope(error.status_code, message, None, code)
    request.app.state.context.metrics.failed(code, error.status_code)
    log_refusal(request.scope, code, message, None)
    return JSONResponse(body, error.status_code, headers=headers)


def log_refusal(scope: Scope, code: str, message: str, param: str | None) -> None:
    """Log why a request is refused."""
    request_id = scope.get("state", {}).get("request_id", "-")
    text = " ".join(f"{'' if param is None else f'{param}: '}{message}".split())
    where = f"{scope['method']} {bounded(scope['path'], 100)!r}"
    extra = {"x_request_id": request_id, "code": code}
    logger.info("x-request-id %s: %s refused: %s: %s", request_id, where, code, bounded(text), extra=extra)


def _hint(request: Request) -> str:
    """Return what to do about an unknown path."""
    path = request.scope["path"]  # a URL is built from the header Host, which may be anything
    wanted = {**request.scope, "path": f"/v1{path}"}
    if any(route.matches(wanted)[0] is not Match.NONE for route in request.app.routes):
        return f"there is no {path}: send the request to /v1{path} (a client's base URL ends with /v1)"
    return f"there is no {bounded(path, 100)!r}: requests go to /v1/chat/completions, and /docs lists all paths"


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again after this answer. The server then logs the traceback.
    request_id = request.scope.get("state", {}).get("request_id", "-")
    text, extra = "x-request-id %s: %s %s failed: %r", {"x_request_id": request_id}
    logger.error(text, request_id, request.method, bounded(request.scope["path"], 100), error, extra=extra)
    request.app.state.context.metrics.failed(InternalError.code, InternalError.status)
    headers = {"x-should-retry": "false", "x-request-id": request_id}
    body = envelope(500, "the server failed on this request; its log says why", None, InternalError.code)
    return JSONResponse(body, 500, headers=headers)


def _describe(errors: Sequence[Any]) -> tuple[str, str | None, str]:
    """Return message, param and code for a body of the wrong shape.

    An unknown field is reported first, then an error of our own validators, then any other error.
    """
    telling = ({"extra_forbidden"}, {MISPLACED, UNSUPPORTED})
    first = next((each for types in telling for each in errors if each["type"] in types), errors[0])
    param = _path(first["loc"])
    if first["type"] in (MISPLACED, UNSUPPORTED):
        return bounded(first["msg"]), param or None, first["type"]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        if name in REFUSED:
            return f"{bounded(param)}: {REFUSED[name][0]}", bounded(param), "unsupported_parameter"
        return f"Unknown parameter: '{bounded(param)}'", bounded(param), "unknown_parameter"
    if first["type"] == "missing" and param:
        return f"Missing required parameter: '{param}'", param, "missing_required_parameter"
    if not param:
        return "the body must be a JSON object (content-type: application/json)", None, "invalid_request"
    return f"Invalid '{param}': {bounded(first['msg'])}", param, "invalid_type"


_TAGS = {"str", "int", "float", "bool", "dict", "list", "none", "any"}


def _path(location: Sequence[str | int]) -> str:
    """Write `("body", "messages", 0, "content", "str")` as OpenAI does: `messages[0].content`."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TAGS and "[" not in part:  # pydantic inserts the type that it tried
            path += f".{part}" if path else part
    return path
