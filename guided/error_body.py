"""Errors in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, plus `pointer`."""

from __future__ import annotations

import math
from typing import Any

from guided.errors import GuidedError


def error_body(error: GuidedError) -> dict[str, Any]:
    """Return the body of an error response, also used as the payload of an error event in a stream."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code, "pointer": error.pointer}
    return {"error": fields}


def error_headers(error: GuidedError) -> dict[str, str]:
    """Return the headers that say whether and when to try again, and the challenge of a 401."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
