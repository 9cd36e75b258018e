"""ServerContext: the engine, the settings, the metrics and the number of requests in
flight, shared by all routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio
from anyio import CapacityLimiter
from fastapi import Depends, Request

from engine.async_llm import AsyncLLM
from engine.detokenizer import TokenTexts
from engine.server.http_errors import QueueFull, ShuttingDown
from engine.server.metrics import Metrics
from engine.server.options import ServerSettings
from guided.backends import AUTO
from guided.errors import InvalidRequest, bounded
from guided.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    detect,
    tool_format,
)

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger("guided.server")


@dataclass
class ServerContext:
    """The state that all routes share."""

    llm: AsyncLLM
    settings: ServerSettings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    shutting_down: bool = False
    in_flight: int = 0
    """Number of generations that run or wait."""
    large_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(64))
    """Limits how many large bodies are read and checked at the same time, which bounds
    memory."""
    _threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))
    """Threads that read bodies and write answers. They share the interpreter lock with
    the engine's thread."""

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of function calls. None: the format is unknown."""
        return tool_format(self._chosen(self.settings.tool_format, TOOL_FORMATS))

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of the model's thinking phase. None: the model has no thinking
        phase."""
        return REASONING_FORMATS.get(
            self._chosen(self.settings.reasoning_format, REASONING_FORMATS) or ""
        )

    def _chosen(self, chosen: str, formats: Mapping[str, Any]) -> str | None:
        """Return the name of the chosen format. `auto` takes the one with marks in the
        tokenizer's templates."""
        tokenizer = self.llm.tokenizer
        templates = (
            f"{tokenizer.chat_template}{getattr(tokenizer, 'response_template', '')}"
        )
        if chosen == AUTO:
            return detect(templates, formats)
        return chosen

    @property
    def texts(self) -> TokenTexts:
        return self.llm.engine.texts

    @cached_property
    def max_characters(self) -> int:
        """Length of the longest text that can fit into the model's context. Longer
        texts are not tokenized."""
        return self.llm.max_model_len * max(
            map(len, self.llm.model.vocabulary.token_bytes)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return b"".join(map(self.texts.bytes_of, tokens)).decode("utf-8", "replace")

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names. None: the served model."""
        if name not in (None, self.settings.model_name):
            message = f"The model {bounded(name, 100)!r} does not exist; here: {self.settings.model_name}"
            raise InvalidRequest(
                message, param="model", code="model_not_found", status=404
            )

    def client_left(self, http_id: str) -> None:
        """Count and log a request that was aborted because its client disconnected."""
        self.metrics.aborts.labels("disconnected").inc()
        logger.info(
            "x-request-id %s: the client went away",
            http_id,
            extra={"x_request_id": http_id},
        )

    async def in_thread(
        self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` in a worker thread, because it may be slow. It cannot be cancelled
        once it has begun."""
        return await anyio.to_thread.run_sync(
            partial(work, *args, **kwargs), limiter=self._threads
        )

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count `count` generations as in flight until the block ends. Raises the
        errors of `check_room`."""
        self.check_room(count)
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count

    def check_room(self, count: int) -> None:
        """Raise `ShuttingDown` or `QueueFull` if `count` more generations could not
        run."""
        if self.shutting_down:
            raise ShuttingDown("the server is shutting down")
        limit = self.settings.max_requests
        if self.in_flight + count > limit:
            raise QueueFull(
                f"{self.in_flight} generations run or wait and the limit is {limit}: try again"
            )


async def _context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(_context)]
"""The type of a route's parameter that receives the context."""
