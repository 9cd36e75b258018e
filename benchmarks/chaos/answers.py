"""Send a request, behave as it says, and check the answer: valid, a declared error, or a violation."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import jsonschema

from benchmarks.chaos.traffic import PATH, Example, Request
from engine.server.errors import QueueFull, ShuttingDown
from guided.errors import GuidedError, InternalError

LEAVE_SECONDS = 0.5
Outcome = Literal["valid", "failed", "refused", "left", "invalid", "different", "undeclared", "hung"]
MUST_NOT: tuple[Outcome, ...] = ("invalid", "different", "undeclared", "hung")
"""Outcomes that are violations under any fault."""


def _codes(root: type[GuidedError]) -> set[str]:
    return {root.code}.union(*(_codes(child) for child in root.__subclasses__()))


_SHAPE = {"invalid_request", "invalid_json", "invalid_type", "missing_required_parameter", "unknown_parameter"}
_SHAPE |= {"unsupported_parameter", "misplaced_parameter", QueueFull.code, ShuttingDown.code}
DECLARED = (_codes(GuidedError) | _SHAPE) - {GuidedError.code, InternalError.code}
"""Error codes with a specific cause. `internal_error` has none."""


@dataclass
class Choice:
    """One of a request's outputs."""

    text: str = ""
    finish_reason: str | None = None


@dataclass
class Answer:
    """The answer to one request. Times are `time.monotonic()`, in seconds."""

    began: float
    ended: float = 0.0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    """The `error` of the body or of the stream's error event."""
    complete: bool = False
    """Whether the JSON body is whole, or the stream ended with `[DONE]`."""
    used: str | None = None
    """The backend named in the answer."""
    problem: str | None = None
    """A problem with the transport: a broken connection, invalid JSON, an event after the end."""
    hung: bool = False
    left: bool = False
    """Whether the client disconnected, as the request says."""


async def ask(http: httpx.AsyncClient, request: Request, limit: float) -> Answer:
    """Send a request and return its answer. Never raises.

    Args:
        limit: seconds after which the request counts as hung.
    """
    answer = Answer(time.monotonic())
    leaves = request.behavior == "leaves" and (request.number % 2 or not request.stream)
    patience = LEAVE_SECONDS * (1 + request.number % 7) / 7 if leaves else limit
    try:
        async with asyncio.timeout(patience):
            headers = {"content-type": "application/json"}
            async with http.stream("POST", PATH, content=request.content, headers=headers) as response:
                answer.status, answer.headers = response.status_code, dict(response.headers)
                if request.stream and response.status_code == 200:
                    await _read(response, request, answer)
                else:
                    _take_body(await response.aread(), answer)
    except TimeoutError:
        answer.hung, answer.left = not leaves, bool(leaves)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        answer.problem = f"{type(error).__name__}, status {answer.status}: {str(error)[:200]}"
    answer.ended = time.monotonic()
    return answer


async def _read(response: httpx.Response, request: Request, answer: Answer) -> None:
    count = 0
    async for line in response.aiter_lines():
        if not line:
            continue
        if answer.complete or answer.error is not None or not line.startswith("data: "):
            answer.problem = f"an event after the end, or none: {line[:200]}"
        else:
            _take_event(line.removeprefix("data: "), answer)
        count += 1
        if request.behavior != "reads" and count > 2 + request.number % 5:
            answer.left = True
            return


def _take_body(content: bytes, answer: Answer) -> None:
    body = json.loads(content)
    if answer.status != 200:
        answer.error = body["error"]
        return
    answer.used = (body["guided"] or {}).get("backend")
    for choice in body["choices"]:
        answer.choices[choice["index"]] = Choice(choice["message"]["content"], choice["finish_reason"])
    answer.complete = True


def _take_event(data: str, answer: Answer) -> None:
    if data == "[DONE]":
        answer.complete = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return
    if event.get("guided"):
        answer.used = event["guided"]["backend"]
    for part in event["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        choice.text += part["delta"].get("content") or ""
        choice.finish_reason = part["finish_reason"] or choice.finish_reason


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    cause: str = ""
    """The error's code, or the problem with the output."""


def verdict_of(request: Request, answer: Answer, references: Mapping[str, Choice]) -> Verdict:
    """Return the verdict on an answer. The output of a hostile request is not checked, nor one that was cut.

    Args:
        references: `Request.key` -> output of the same request without faults.
    """
    if answer.hung:
        return Verdict("hung", f"no end after {answer.ended - answer.began:.0f} s")
    if answer.problem is not None:
        return Verdict("undeclared", answer.problem)
    if answer.error is not None:
        return _of_error(answer.error, answer)
    if answer.left:
        return Verdict("left")
    if not answer.complete:
        return Verdict("undeclared", "a stream without an end")
    if request.hostile is not None:
        return Verdict("valid")
    if len(answer.choices) != request.body.get("n", 1):
        return Verdict("invalid", f"{len(answer.choices)} choices")
    if request.backend not in (None, "auto", answer.used):
        return Verdict("invalid", f"{answer.used} was used, not {request.backend}")
    reference = references.get(request.key or "")
    for choice in answer.choices.values():
        if choice.finish_reason not in ("stop", "length"):
            return Verdict("invalid", f"finish_reason {choice.finish_reason}")
        if choice.finish_reason == "stop" and request.example and (wrong := unsatisfied(request.example, choice.text)):
            return Verdict("invalid", wrong)
        if reference is not None and choice != reference:
            return Verdict("different", f"{choice.text[:200]!r}, without faults {reference.text[:200]!r}")
    return Verdict("valid")


def unsatisfied(example: Example, text: str) -> str | None:
    """Return why a whole output doesn't satisfy the constraint, or None."""
    if example.kind in ("json_schema", "json_object"):
        schema = example.value if example.kind == "json_schema" else {"type": "object"}
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"not valid: {text[:200]!r} ({str(error)[:200]})"
        return None
    fine = text in example.value if example.kind == "choice" else re.fullmatch(example.pattern, text)
    return None if fine else f"no {example.kind} {example.value!r}: {text[:200]!r}"


def _of_error(error: Mapping[str, Any], answer: Answer) -> Verdict:
    """Return the verdict on an error: it needs its fields, a specific code, and a time to retry where that helps."""
    if missing := {"message", "type", "param", "code"} - error.keys():
        return Verdict("undeclared", f"an error without {', '.join(sorted(missing))}")
    code, status = str(error["code"]), answer.status or 500
    if code not in DECLARED:
        return Verdict("undeclared", f"{status} {code}: {str(error['message'])[:200]}")
    if status in (429, 503) and "retry-after" not in answer.headers:
        return Verdict("undeclared", f"{status} {code} without retry-after")
    return Verdict("refused" if 400 <= status < 500 else "failed", code)
