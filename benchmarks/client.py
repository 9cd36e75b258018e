"""Send a request to a server under test, and read its answer, streamed or not."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/chat/completions"


@dataclass
class Choice:
    """An output of a request."""

    text: str = ""
    finish_reason: str | None = None


@dataclass
class Answer:
    """The answer to one request. Times are `time.monotonic()`, in seconds."""

    began: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Times of the events of a stream that have text."""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    """The `error` of the body or of the stream's error event."""
    complete: bool = False
    """Whether the JSON body is whole, or the stream ended with `[DONE]`."""
    backend: str | None = None
    """The backend named in the answer."""
    tokens: int = 0
    """Completion tokens in `usage`."""
    problem: str | None = None
    """A problem with the transport: a broken connection, invalid JSON, an event after
    the end."""
    hung: bool = False
    """Whether the answer took longer than the limit."""
    left: bool = False
    """Whether the client disconnected early, as requested."""

    @property
    def failure(self) -> str:
        """The error's code, or the problem with the transport; empty if the answer is
        complete."""
        if self.error is not None:
            return str(self.error.get("code") or self.status)
        return self.problem or (
            "" if self.complete else "hung" if self.hung else "no end"
        )

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events. If the request hangs, the time since the last
        event is a gap."""
        times = [*self.arrivals, self.ended] if self.hung else self.arrivals
        return [after - before for before, after in itertools.pairwise(times)]

    def take_body(self, content: bytes) -> None:
        """Read the body of an answer that is not streamed."""
        body = json.loads(content)
        if self.status != 200:
            self.error = body["error"]
            return
        self.backend = (body.get("guided") or {}).get("backend")
        for choice in body["choices"]:
            self.choices[choice["index"]] = Choice(
                choice["message"]["content"], choice["finish_reason"]
            )
        self.complete = True

    def take_line(self, line: str) -> None:
        """Read a line of a stream."""
        if self.complete or self.error is not None or not line.startswith("data: "):
            self.problem = f"an event after the end, or none: {line[:200]}"
            return
        data = line.removeprefix("data: ")
        event = {"choices": []} if data == "[DONE]" else json.loads(data)
        self.complete, self.error = data == "[DONE]", event.get("error")
        self.backend = (event.get("guided") or {}).get("backend", self.backend)
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            if text := part["delta"].get("content"):
                choice.text += text
                self.arrivals.append(time.monotonic())
            choice.finish_reason = part["finish_reason"] or choice.finish_reason


async def ask(
    http: httpx.AsyncClient,
    body: Mapping[str, Any],
    limit: float,
    *,
    leave_seconds: float | None = None,
    leave_events: int | None = None,
) -> Answer:
    """Send a chat request and return its answer. Never raises.

    Args:
        limit: seconds after which the request counts as hung.
        leave_seconds: seconds after which the client disconnects.
        leave_events: number of events of a stream after which the client disconnects.
    """
    answer = Answer(time.monotonic())
    try:
        async with asyncio.timeout(limit if leave_seconds is None else leave_seconds):
            headers = {"content-type": "application/json"}
            async with http.stream(
                "POST", PATH, content=json.dumps(body).encode(), headers=headers
            ) as response:
                answer.status, answer.headers = (
                    response.status_code,
                    dict(response.headers),
                )
                if not body.get("stream") or response.status_code != 200:
                    answer.take_body(await response.aread())
                else:
                    await _read(response, answer, leave_events)
    except TimeoutError:
        answer.hung, answer.left = leave_seconds is None, leave_seconds is not None
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        answer.problem = (
            f"{type(error).__name__}, status {answer.status}: {str(error)[:200]}"
        )
    answer.ended = time.monotonic()
    return answer


async def _read(
    response: httpx.Response, answer: Answer, leave_events: int | None
) -> None:
    events = 0
    async for line in response.aiter_lines():
        if line:
            answer.take_line(line)
            events += 1
        if events == leave_events:
            answer.left = True
            return
