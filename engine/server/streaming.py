"""Server-sent events: a generation as OpenAI's clients read it.

The status was sent when the first event is; a failure after that is one `data: {"error": ...}`, and the stream ends
without `[DONE]`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.errors import error_body
from engine.server.generation import Job, Outputs, usage_of
from engine.server.metrics import Metrics
from engine.server.protocol import Usage
from guided.errors import GuidedError, InternalError

__all__ = ["Chunks", "EventStream", "events"]

logger = logging.getLogger("guided.server")

DONE = b"data: [DONE]\n\n"


class Chunks(Protocol):
    """How one endpoint writes its chunks."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk."""

    def delta(self, index: int, text: str, output: CompletionOutput, start: int) -> dict[str, Any]:
        """New text of a choice, of the tokens from `start` on; called in their order."""

    def finish(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """A choice's last chunk."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The stream's last chunk, without choices."""


class EventStream(StreamingResponse):
    """A stream that gives its generation back however it ends, also when it never began."""

    def __init__(self, content: AsyncIterator[bytes], resources: AsyncExitStack, headers: dict[str, str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


async def events(
    outputs: Outputs, job: Job, chunks: Chunks, metrics: Metrics, include_usage: bool
) -> AsyncIterator[bytes]:
    """The whole stream, event by event."""
    finished: dict[int, RequestOutput] = {}
    try:
        for index in range(job.num_choices):
            if (opening := chunks.opening(index)) is not None:
                yield _event(opening)
        sent = _Sent(job, chunks)
        async for number, output in outputs.stream:
            for chunk in sent.new(number, output):
                yield _event(chunk)
            if output.finished:
                finished[number] = output
        if include_usage:
            yield _event(chunks.usage(usage_of(list(finished.values()))))
        yield DONE
    except GuidedError as error:
        metrics.failed(error.code)
        if error.status >= 500:
            logger.warning("%s: %s: %s", job.request_id, error.code, error)
        yield _event(error_body(error))
    except Exception:
        logger.exception("%s failed", job.request_id)
        yield _event(error_body(InternalError("the server failed on this request; its log says why")))


class _Sent:
    """What was sent of each choice: characters, tokens, and whether its end was."""

    def __init__(self, job: Job, chunks: Chunks) -> None:
        self._n = job.params.n
        self._chunks = chunks
        self._wants_logprobs = job.params.logprobs is not None
        self._characters = [0] * job.num_choices
        self._tokens = [0] * job.num_choices
        self._ended = [False] * job.num_choices

    def new(self, prompt: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks of what is new in `output`."""
        for completion in output.outputs:
            index = prompt * self._n + completion.index
            if self._ended[index]:
                continue
            characters, tokens = self._characters[index], self._tokens[index]
            text = completion.text[characters:]
            if text or (self._wants_logprobs and len(completion.token_ids) > tokens):
                yield self._chunks.delta(index, text, completion, tokens)
                self._characters[index] += len(text)
                self._tokens[index] = len(completion.token_ids)
            if completion.finish_reason is not None:
                self._ended[index] = True
                yield self._chunks.finish(index, completion)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
