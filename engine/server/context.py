"""ServerContext: what the routes share: engine, settings, metrics, and the number of requests in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from engine.async_llm import AsyncLLM
from engine.detokenizer import TokenTexts
from engine.server.admission_threads import AdmissionThreads
from engine.server.errors import ModelNotFound, QueueFull, ShuttingDown
from engine.server.metrics import Metrics
from engine.server.options import ServerSettings
from guided.errors import bounded
from guided.limits import Limits
from guided.vocabulary import Vocabulary


@dataclass
class ServerContext:
    engine: AsyncLLM
    settings: ServerSettings
    metrics: Metrics
    texts: TokenTexts
    admission: AdmissionThreads
    created: int = field(default_factory=lambda: int(time.time()))
    in_flight: int = 0
    shutting_down: bool = False

    @classmethod
    def build(cls, engine: AsyncLLM, settings: ServerSettings) -> ServerContext:
        texts = TokenTexts(engine.model.vocabulary, engine.tokenizer)
        return cls(engine, settings, Metrics(engine), texts, AdmissionThreads(settings.max_waiting))

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
        """Check the model that a request names. None: the served model.

        Raises:
            ModelNotFound: this server does not serve the model.
        """
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise ModelNotFound(
                f"The model {bounded(name, 100)!r} does not exist; served here: {served}", param="model"
            )

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count `count` generations as in flight until the block ends.

        Raises:
            QueueFull: a limit would be exceeded.
            ShuttingDown: the server takes no more requests.
        """
        if self.shutting_down:
            raise ShuttingDown("the server is shutting down")
        if self.in_flight + count > self.settings.max_requests:
            raise QueueFull(
                f"{self.in_flight} requests are in flight and the limit is {self.settings.max_requests}: try again"
            )
        waiting = self.engine.num_waiting  # if none wait, a request may have more prompts than the limit
        if waiting and waiting + count > self.settings.max_waiting:
            raise QueueFull(f"{waiting} requests wait and the limit is {self.settings.max_waiting}: try again")
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count


def _context(request: Request) -> ServerContext:
    found: ServerContext = request.app.state.context
    return found


Context = Annotated[ServerContext, Depends(_context)]
"""Type of a route's parameter that receives the context."""
