"""ServerContext: what the routes share: engine, settings, metrics, and the number of requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from engine.async_llm import AsyncLLM
from engine.detokenizer import TokenTexts
from engine.server.admission_threads import AdmissionThreads
from engine.server.errors import ModelNotFound, QueueFull, ShuttingDown
from engine.server.metrics import Metrics
from engine.server.options import ServerSettings
from engine.server.readiness import ReadinessCheck
from engine.server.tracing import Tracing
from engine.server.turns import ClientTurns
from guided.backends import AUTO
from guided.errors import InvalidRequest, bounded
from guided.limits import Limits
from guided.tools.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat, detect
from guided.vocabulary import Vocabulary

T = TypeVar("T")


@dataclass
class ServerContext:
    engine: AsyncLLM
    settings: ServerSettings
    metrics: Metrics
    admission: AdmissionThreads
    readiness: ReadinessCheck
    turns: ClientTurns
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    shutting_down: bool = False
    _pausing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _in_flight: Counter[str] = field(default_factory=Counter)
    """Generations in flight, by client."""

    @classmethod
    def build(cls, engine: AsyncLLM, settings: ServerSettings, tracing: Tracing | None = None) -> ServerContext:
        turns = ClientTurns(lambda _: engine.engine.config.max_num_seqs, settings.max_waiting)
        admission = AdmissionThreads(settings.max_waiting, turns.has_others)
        readiness = ReadinessCheck(engine, settings.backend, admission)
        return cls(engine, settings, Metrics(engine), admission, readiness, turns, tracing)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of function calls. None: none is known."""
        return self._format(self.settings.tool_format, TOOL_FORMATS)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The model's format of its thinking phase. None: it has none."""
        return self._format(self.settings.reasoning_format, REASONING_FORMATS)

    def _format(self, chosen: str, formats: Mapping[str, T]) -> T | None:
        template = self.engine.tokenizer.chat_template
        found = detect(str(template or ""), formats) if chosen == AUTO else chosen
        return formats.get(found or "")

    @property
    def texts(self) -> TokenTexts:
        return self.engine.engine.texts

    @property
    def vocabulary(self) -> Vocabulary:
        return self.engine.model.vocabulary

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    @property
    def limits(self) -> Limits:
        """The limits of a request's constraint."""
        return self.engine.engine.config.limits

    @property
    def has_logits_processors(self) -> bool:
        """A custom logits processor could read `vllm_xargs`."""
        return bool(self.engine.engine.sampler.processors.classes)

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names. None: the served model."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise ModelNotFound(f"The model {bounded(name, 100)!r} does not exist; here: {served}", param="model")

    def check_logprobs(self, choices: int, tokens: int, alternatives: int | None, param: str) -> None:
        """Bound the size of an answer with several choices: each of `tokens` can have 21 log-probabilities.

        Raises:
            InvalidRequest: the answer could have too many.
        """
        count = 0 if alternatives is None or choices == 1 else tokens * (alternatives + 1)
        limit = self.settings.max_answer_logprobs
        if count > limit:
            raise InvalidRequest(
                f"prompts, n, max_tokens and {param} together allow {count} log-probabilities; the limit for several "
                f"choices is {limit}",
                param=param,
            )

    async def pause(self) -> None:
        """Let the event loop go on. Of all answers that pause, at most one continues in each turn of the loop."""
        async with self._pausing:
            await asyncio.sleep(0)

    @contextmanager
    def admit(self, count: int, client: str) -> Iterator[None]:
        """Count `count` generations of a client as in flight until the block ends.

        A client alone may use a limit in full. If several have generations in flight, the limit divided by their number
        is a client's share. Beyond the limit, a client within its share is still admitted, up to twice the limit. So a
        client that fills the server delays the others, but does not lock them out.
        """
        if self.shutting_down:
            raise ShuttingDown("the server is shutting down")
        limit = self.settings.max_requests
        share = 1 / len(self._in_flight.keys() | {client})
        used = self._in_flight[client] + count

        def is_over(total: int, limit: int) -> bool:
            return total > limit and (used > limit * share or total > 2 * limit)

        if is_over(self.in_flight + count, limit):
            raise QueueFull(f"{self.in_flight} requests are in flight and the limit is {limit}: try again")
        waiting, limit = self.engine.num_waiting, self.settings.max_waiting
        if waiting and is_over(waiting + count, limit):  # if none wait, a request may have more prompts than the limit
            raise QueueFull(f"{waiting} requests wait and the limit is {limit}: try again")
        self._in_flight[client] += count
        try:
            yield
        finally:
            self._in_flight[client] -= count
            if not self._in_flight[client]:
                del self._in_flight[client]

    @property
    def in_flight(self) -> int:
        """Number of generations in flight."""
        return self._in_flight.total()


async def _context(request: Request) -> ServerContext:
    found: ServerContext = request.app.state.context
    return found


Context = Annotated[ServerContext, Depends(_context)]
"""Type of a route's parameter that receives the context."""
