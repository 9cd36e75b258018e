"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, plus `pointer`."""

from __future__ import annotations

import math
from typing import Any

from guided.errors import GuidedError

__all__ = ["envelope", "error_body", "error_headers"]


def error_body(error: GuidedError) -> dict[str, Any]:
    """The answer's body, and the payload of a stream's error event."""
    return envelope(error.status, str(error), error.param, error.code, error.pointer)


def error_headers(error: GuidedError) -> dict[str, str]:
    """Whether and when to try again; a 401's challenge."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def envelope(status: int, message: str, param: str | None, code: str, pointer: str | None = None) -> dict[str, Any]:
    """The same of what is no `GuidedError`.

    Args:
        status: HTTP's; it says which of OpenAI's types of error this is.
        pointer: RFC 6901, into the schema.
    """
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "pointer": pointer}}
