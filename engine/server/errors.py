"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, plus `pointer`.

`pointer` is an RFC 6901 JSON pointer into the schema, else null. OpenAI's and Anthropic's clients obey the header
`x-should-retry`: it says whether the same request would probably succeed (`GuidedError.retryable`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from guided.errors import CompileTimeout, GuidedError, InternalError, InvalidRequest, bounded, error_body, error_headers

if TYPE_CHECKING:
    from engine.server.context import ServerContext

logger = logging.getLogger("guided.server")


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


MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
"""Errors of the paths that begin with these have the shape of Anthropic's and of Ollama's."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status. Others are an `invalid_request_error` or an `api_error`."""


def message_error(error: GuidedError) -> dict[str, Any]:
    """Return an error as Anthropic's API does."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"error_code": error.code, "param": error.param, "pointer": error.pointer}
    return {"type": "error", "error": {"type": kind, "message": _named(error), "details": details}}


def ollama_error(error: GuidedError) -> dict[str, Any]:
    """Return an error as Ollama's API does."""
    return {"error": _named(error)}


def _named(error: GuidedError) -> str:
    """Return a message that names the field at fault, for clients that show only the message."""
    name = error.param
    is_named = name is None or f"'{name}'" in error.message or error.message.startswith((f"{name} ", f"{name}:"))
    return str(error) if is_named else f"{name}: {error}"


_BODIES = {MESSAGES_PATH: message_error, OLLAMA_PATH: ollama_error}
"""What makes the bodies of errors, by the beginning of the path. Elsewhere it is `error_body`."""


def install_handlers(app: FastAPI) -> None:
    """Answer every error of the application in this shape."""
    app.add_exception_handler(GuidedError, _on_guided_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


def respell(error: GuidedError, scope: Scope) -> None:
    """Name the field at fault as the request does."""
    names: Mapping[str, str] = scope.get("state", {}).get("field_names", {})
    sent = names.get(error.param or "", error.param)
    error.message = error.message.replace(f"'{error.param}'", f"'{sent}'").replace(f"{error.param} is ", f"{sent} is ")
    error.param = sent


def refuse(context: ServerContext, scope: Scope, error: GuidedError, **headers: str) -> JSONResponse:
    """Count and log an error, and return the answer. `headers` are further ones of the answer."""
    respell(error, scope)
    context.metrics.failed(error.code, error.status)
    if error.status < 500 and not isinstance(error, CompileTimeout):  # those are logged where they happen
        _log(scope, error)
    body_of = next((made for begin, made in _BODIES.items() if scope["path"].startswith(begin)), error_body)
    return JSONResponse(body_of(error), error.status, error_headers(error) | headers)


async def _on_guided_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GuidedError)
    headers = {"connection": "close"} if isinstance(error, RequestTimeout) else {}  # the rest of its body is not read
    return refuse(request.app.state.context, request.scope, error, **headers)


async def _on_http_exception(request: Request, raised: Exception) -> JSONResponse:
    assert isinstance(raised, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    message = _hint(request) if raised.status_code == 404 else bounded(raised.detail)
    error = InvalidRequest(message, code=codes.get(raised.status_code, ""), status=raised.status_code)
    return refuse(request.app.state.context, request.scope, error, **(raised.headers or {}))


def _log(scope: Scope, error: GuidedError) -> None:
    """Log why a request is refused."""
    request_id = scope.get("state", {}).get("request_id", "-")
    text = " ".join(f"{'' if error.param is None else f'{error.param}: '}{error.message}".split())
    where = f"{scope['method']} {bounded(scope['path'], 100)!r}"
    extra = {"x_request_id": request_id, "code": error.code}
    logger.info("x-request-id %s: %s refused: %s: %s", request_id, where, error.code, bounded(text), extra=extra)


def _hint(request: Request) -> str:
    """Return what to do about an unknown path."""
    path = request.scope["path"]  # a URL is built from the header Host, which may be anything
    if path.startswith(f"/v1{MESSAGES_PATH}"):
        return f"there is no {bounded(path, 100)!r}: the base URL of Anthropic's clients ends without /v1"
    wanted = {**request.scope, "path": f"/v1{path}"}
    if any(route.matches(wanted)[0] is not Match.NONE for route in request.app.routes):
        return f"there is no {path}: send the request to /v1{path} (a client's base URL ends with /v1)"
    return f"there is no {bounded(path, 100)!r}: requests go to /v1/chat/completions, and /docs lists all paths"


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again after this answer, outside of our middleware. The server then logs the traceback.
    request_id = request.scope.get("state", {}).get("request_id", "-")
    text, extra = "x-request-id %s: %s %s failed: %r", {"x_request_id": request_id}
    logger.error(text, request_id, request.method, bounded(request.scope["path"], 100), error, extra=extra)
    internal = InternalError("the server failed on this request; its log says why")
    return refuse(request.app.state.context, request.scope, internal, **{"x-request-id": request_id})


def shape_error(errors: Sequence[Any]) -> InvalidRequest:
    """Return the error for a body of the wrong shape: of an unknown field or type, else of the innermost value."""
    telling = {"unsupported_parameter": 2, "unknown_parameter": 2, "literal_error": 1}
    first = max(errors, key=lambda each: (telling.get(each["type"], 0), len(each["loc"])))
    code, why, place = first["type"], first["msg"].partition(" or instance of")[0], first["loc"]
    if telling.get(code) == 2:
        place = (*place, first["ctx"]["name"])
    param = bounded(_path(place))
    if code == "unsupported_parameter":
        message = f"{param}: {why}"
    elif code == "unknown_parameter":
        message = f"Unknown parameter: '{param}'" + (f"; did you mean {why}?" if why else "")
    elif param:
        if code == "literal_error" and "content" in place and place[-1] == "type":
            why += ". Images, sounds and files are not supported: the models served here read text"
        code, message = "invalid_type", f"Invalid '{param}': {bounded(why)}"
    else:
        code, message = "", "the body must be a JSON object (content-type: application/json)"
    return InvalidRequest(message, param=param or None, code=code)


_TAGS = {"str", "int", "float", "bool", "dict", "list", "none", "any"}


def _path(location: Sequence[str | int]) -> str:
    """Write `("messages", 0, "content", "str")` as OpenAI does: `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TAGS and "[" not in part:  # pydantic inserts the type that it tried
            path += f".{part}" if path else part
    return path
