"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param",
"code"}}`, plus `pointer`.

`pointer` is an RFC 6901 JSON pointer into the schema, else null. OpenAI's and
Anthropic's clients obey the header `x-should-retry`, which says whether the same
request would probably succeed (`GuidedError.retryable`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from guided.errors import GuidedError, InternalError, InvalidRequest, bounded
from guided.json_text import JsonObject


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
"""Prefix of the paths with errors in Ollama's shape. Paths that begin with
`MESSAGES_PATH` have Anthropic's."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> type of the error. Other statuses are an `invalid_request_error` or an
`api_error`."""


def message_error(error: GuidedError) -> JsonObject:
    """Return an error as Anthropic's API does."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    if error.status >= 500 and error.status not in _ANTHROPIC_TYPES:
        kind = "api_error"
    details = {"error_code": error.code, "param": error.param, "pointer": error.pointer}
    return {
        "type": "error",
        "error": {"type": kind, "message": _named(error), "details": details},
    }


def ollama_error(error: GuidedError) -> JsonObject:
    """Return an error as Ollama's API does."""
    return {"error": _named(error)}


def _named(error: GuidedError) -> str:
    """Return a message that names the field at fault, for clients that show only the
    message."""
    name = error.param
    is_named = (
        name is None
        or f"'{name}'" in error.message
        or error.message.startswith((f"{name} ", f"{name}:"))
    )
    if is_named:
        return str(error)
    return f"{name}: {error}"


class FieldNames(dict[str, str]):
    """Fields of the chat that a request is translated to -> their names in the request.
    Parts of a field follow it.

    Routes add the fields that they translate, parts before the fields that contain
    them.
    """

    def of(self, field: str) -> str:
        """Return the name of a field in the request."""
        for name, sent in self.items():
            if field == name or field.startswith((f"{name}.", f"{name}[")):
                return sent + field[len(name) :]
        return field

    def respell(self, error: GuidedError) -> None:
        """Name the field at fault as the request does."""
        if error.param is not None:
            sent = self.of(error.param)
            name = rf"(?<![\w.]){re.escape(error.param)}(?![\w\[])"
            error.message = re.sub(name, lambda match: sent, error.message)
            error.param = sent


def shape_error(errors: Sequence[Any]) -> InvalidRequest:
    """Return the error for a body of the wrong shape. Unknown fields come first, then
    unknown types, then the innermost value."""
    telling = {"unsupported_parameter": 2, "unknown_parameter": 2, "literal_error": 1}
    first = max(
        errors, key=lambda error: (telling.get(error["type"], 0), len(error["loc"]))
    )
    code = first["type"]
    why = first["msg"].partition(" or instance of")[0]
    place = first["loc"]
    if telling.get(code) == 2:
        place = (*place, first["ctx"]["name"])
    param = bounded(_path(place))
    if code == "unsupported_parameter":
        message = f"{param}: {why}"
    elif code == "unknown_parameter":
        message = f"Unknown parameter: '{param}'"
        if why:
            message += f"; did you mean {why}?"
    elif param:
        if code == "literal_error" and "content" in place and place[-1] == "type":
            why += ". Images, sounds and files are not supported: the models served here read text"
        code = "invalid_type"
        message = f"Invalid '{param}': {bounded(why)}"
    else:
        code = ""
        message = "the body must be a JSON object (content-type: application/json)"
    return InvalidRequest(message, param=param or None, code=code)


_TAGS = {"str", "int", "float", "bool", "dict", "list", "none", "any"}


def _path(location: Sequence[str | int]) -> str:
    """Write `("messages", 0, "content", "str")` as OpenAI does:
    `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TAGS and "[" not in part:
            # pydantic inserts the type that it has tried
            path += f".{part}"
    return path.removeprefix(".")
