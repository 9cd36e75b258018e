"""Errors in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, plus `pointer`."""

from __future__ import annotations

import math
from typing import Any

from guided.errors import GuidedError


def error_body(error: GuidedError) -> dict[str, Any]:
    """Return the body of an error response, also used as the payload of an error event in a stream."""
    return envelope(error.status, str(error), error.param, error.code, error.pointer)


def error_headers(error: GuidedError) -> dict[str, str]:
    """Return the headers that say whether and when to try again, and the challenge of a 401."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def envelope(status: int, message: str, param: str | None, code: str, pointer: str | None = None) -> dict[str, Any]:
    """Return the body of an error that is no `GuidedError`.

    Args:
        status: HTTP status, which determines OpenAI's error type.
        pointer: RFC 6901 pointer into the schema.
    """
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "pointer": pointer}}
