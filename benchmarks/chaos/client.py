"""A client that sends one request, behaves as the request says, and records the answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos.traffic import Request

STALL_SECONDS = 8.0
LEAVE_SECONDS = 0.5


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
    decided: float | None = None
    """Time of the HTTP status."""
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
    arrivals: list[float] = field(default_factory=list)
    """Times of chunks with text."""


async def ask(http: httpx.AsyncClient, request: Request, limit: float) -> Answer:
    """Send a request and return its answer. Never raises.

    Args:
        limit: seconds after which the request counts as hung.
    """
    answer = Answer(time.monotonic())
    patience = _patience(request)
    try:
        async with asyncio.timeout(limit if patience is None else patience):
            content = request.content
            headers = {"content-type": "application/json"}
            if request.stream:
                async with http.stream("POST", request.path, content=content, headers=headers) as response:
                    await _read(response, request, answer)
            else:
                response = await http.post(request.path, content=content, headers=headers)
                _take_status(response, answer)
                _take_body(response.content, answer)
    except TimeoutError:
        answer.hung, answer.left = patience is None, patience is not None
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        where = "before the status" if answer.status is None else f"after status {answer.status}"
        answer.problem = f"{type(error).__name__} {where}: {str(error)[:200]}"
    answer.ended = time.monotonic()
    return answer


def _patience(request: Request) -> float | None:
    """Return the seconds after which the client disconnects in any case, or None if it waits."""
    if request.behavior == "leaves" and (request.number % 2 or not request.stream):
        return LEAVE_SECONDS * (1 + request.number % 7) / 7
    return None


async def _read(response: httpx.Response, request: Request, answer: Answer) -> None:
    _take_status(response, answer)
    if response.status_code != 200:
        _take_body(await response.aread(), answer)
        return
    count = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            if line:
                answer.problem = f"a line that is no event: {line[:200]}"
            continue
        if answer.complete or answer.error is not None:
            answer.problem = f"an event after the end: {line[:200]}"
        _take_event(line.removeprefix("data: "), answer)
        count += 1
        if request.behavior != "reads" and count > 2 + request.number % 5:
            await asyncio.sleep(STALL_SECONDS if request.behavior == "stalls" else 0)
            answer.left = True
            return


def _take_status(response: httpx.Response, answer: Answer) -> None:
    answer.decided = time.monotonic()
    answer.status = response.status_code
    answer.headers = dict(response.headers)


def _take_body(content: bytes, answer: Answer) -> None:
    body = json.loads(content)
    if answer.status != 200:
        answer.error = body["error"]
        return
    answer.used = (body["guided"] or {}).get("backend")
    for choice in body["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        answer.choices[choice["index"]] = Choice(text, choice["finish_reason"])
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
        text = part["delta"].get("content") if "delta" in part else part["text"]
        if text:
            choice.text += text
            answer.arrivals.append(time.monotonic())
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
