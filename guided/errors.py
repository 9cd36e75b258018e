"""The tree of all exceptions that `guided` raises.

GuidedError
├── InvalidRequest              the request is wrong: HTTP 400; names `param` and, if there is one, a JSON pointer
│   ├── ContextLengthExceeded   the prompt and its output do not fit into the model's context
│   └── InvalidConstraint       the constraint is malformed, or no output satisfies it
│       ├── ConstraintTooLarge  the constraint exceeds a stated limit
│       └── UnsupportedConstraint   the backend can't enforce the constraint: names both
├── CompileTimeout              compilation took too long: never cached as invalid
├── ConstraintQuarantined       the constraint has ended several mask actors: refused for ten minutes, HTTP 400
├── CompileQueueFull            too many constraints wait for compilation: HTTP 429
└── InternalError               the service failed: HTTP 500, FINISHED_INTERNAL_ERROR
    ├── BackendError            a grammar library raised an exception, or gave a wrong answer
    │   ├── DeadEnd             no token is allowed and the constraint is not satisfied
    │   └── TokenRejected       the matcher rejected a token that the mask allowed
    ├── ConstraintNotMet        the output is complete, and violates a keyword that is checked at the end
    ├── MaskTimeout             a mask did not arrive within the fill limit
    ├── GrammarLoadTimeout      a compiled grammar was not loaded within its limit
    ├── PostProcessorFailed     an application's post-processor raised an exception
    ├── WorkerDied              the process that held the matcher has ended
    └── PoolUnavailable         no worker is up: HTTP 503
"""

from __future__ import annotations

import math
from typing import Any

MAX_ECHO = 300
"""Maximum number of characters of a user's input in a message."""


def bounded(text: object, limit: int = MAX_ECHO) -> str:
    """Return `text` as a printable string of at most `limit` characters, with lone
    surrogates escaped."""
    printable = (
        str(text)
        .encode("utf-8", "backslashreplace")
        .decode("utf-8")
        .replace("\x00", "\\x00")
    )
    if len(printable) <= limit:
        return printable
    return printable[: limit - 1] + "…"


class GuidedError(Exception):
    """The root of the tree. `str(error)` tells the user what is wrong, where, and what
    would work."""

    code = "guided_error"
    status = 500
    retryable = False
    """Whether the same request would probably succeed if it were sent again."""
    retry_after: float = 1.0
    """Seconds after which a client should send the request again, for the statuses 429
    and 503."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        pointer: str | None = None,
        code: str = "",
        status: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.status = status or self.status
        self.message = message
        self.param = param
        """The request field at fault, as the user wrote it."""
        self.pointer = pointer
        """RFC 6901 JSON pointer into the constraint; empty for the whole constraint."""

    def __str__(self) -> str:
        if self.pointer is None:
            return self.message
        if not self.pointer:
            return f"{self.message} (at the root)"
        return f"{self.message} (at {self.pointer!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own pickling drops keyword arguments; Ray and process pools pickle
        # errors.
        return from_wire, (to_wire(self),)


class InvalidRequest(GuidedError):
    code = "invalid_request"
    status = 400


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidConstraint(InvalidRequest):
    code = "invalid_constraint"


class ConstraintTooLarge(InvalidConstraint):
    code = "constraint_too_large"


class UnsupportedConstraint(InvalidConstraint):
    code = "unsupported_constraint"
    keyword = ""
    """The keyword that a library does not enforce, if the library would accept the
    schema without it."""


class CompileTimeout(GuidedError):
    code = "constraint_compile_timeout"
    status = 400


class ConstraintQuarantined(GuidedError):
    code = "constraint_quarantined"
    status = 400


class CompileQueueFull(GuidedError):
    code = "compile_queue_full"
    status = 429
    retryable = True
    retry_after = 5.0


class InternalError(GuidedError):
    code = "internal_error"


class BackendError(InternalError):
    code = "backend_error"


class DeadEnd(BackendError):
    code = "dead_end"


class TokenRejected(BackendError):
    code = "token_rejected"


class ConstraintNotMet(InternalError):
    code = "constraint_not_met"
    retryable = True
    keyword = ""
    """The keyword of the schema that the output violates."""


class MaskTimeout(InternalError):
    code = "mask_timeout"


class GrammarLoadTimeout(InternalError):
    code = "grammar_load_timeout"


class PostProcessorFailed(InternalError):
    code = "post_processor_failed"


class WorkerDied(InternalError):
    code = "worker_died"
    retryable = True


class PoolUnavailable(InternalError):
    code = "pool_unavailable"
    status = 503
    retryable = True


Wire = tuple[str, str, str | None, str | None]
"""An error for a message between processes: code, message, param, pointer."""


def errors_by_code(root: type[GuidedError]) -> dict[str, type[GuidedError]]:
    """Return a class of errors and all its subclasses, by code."""
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(errors_by_code(child))
    return classes


def to_wire(error: BaseException) -> Wire:
    """Pack an error for a message between processes, without pickle."""
    if isinstance(error, GuidedError):
        return error.code, error.message, error.param, error.pointer
    return BackendError.code, bounded(f"{type(error).__name__}: {error}"), None, None


def from_wire(wire: Wire) -> GuidedError:
    """Unpack an error that `to_wire` packed; an unknown code becomes an
    `InternalError`."""
    code, message, param, pointer = wire
    return errors_by_code(GuidedError).get(code, InternalError)(
        message, param=param, pointer=pointer
    )


def error_body(error: GuidedError) -> dict[str, Any]:
    """Return an error in OpenAI's shape, with a `pointer`, for the body of a response
    or an event of a stream."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    fields = {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": error.code,
        "pointer": error.pointer,
    }
    return {"error": fields}


def error_headers(error: GuidedError) -> dict[str, str]:
    """Return the headers that say whether and when to try again, and for a 401 the
    authentication scheme."""
    headers = {"x-should-retry": str(error.retryable).lower()}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
