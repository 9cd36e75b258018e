"""Readiness: when a probe asks, sends a small constrained request through the engine and measures its stages."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from engine.async_llm import AsyncLLM
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.admission_threads import AdmissionThreads
from guided.errors import bounded

Stage = Literal["admission", "compilation", "masks"]

_LIMIT = 1.0
"""Seconds in which each stage must answer."""
_INTERVAL = 2.0
"""Seconds for which a result is reused, so that more probes cause no more checks."""


@dataclass(frozen=True)
class Readiness:
    """The result of a check."""

    seconds: dict[Stage, float]
    """Time that each stage took, of those that have answered."""
    reason: str | None
    """Why the server is not ready."""
    checked: float
    """`time.monotonic()` of the end of the check."""


class ReadinessCheck:
    """Checks that admission, compilation and masks each answer within a second.

    At most one check runs at a time, and at most one starts every few seconds, however many probes there are.
    """

    def __init__(self, engine: AsyncLLM, backend: str, threads: AdmissionThreads) -> None:
        self._engine = engine
        self._backend = backend
        self._threads = threads
        self._numbers = itertools.count()
        self._last: Readiness | None = None
        self._running: asyncio.Task[Readiness] | None = None
        self._admission: asyncio.Future[Any] | None = None
        """May outlive its check: a thread cannot be cancelled."""

    async def result(self) -> Readiness:
        """Return the last result if it is recent, else that of a new check. It takes a few seconds at most."""
        if self._last is None or time.monotonic() - self._last.checked > _INTERVAL:
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._check())
            self._last = await asyncio.shield(self._running)
        return self._last

    async def _check(self) -> Readiness:
        seconds: dict[Stage, float] = {}
        stage: Stage = "admission"
        # A constraint that is not in the cache, and one token of its output.
        params = SamplingParams(regex=f"ready {next(self._numbers)}", backend=self._backend, max_tokens=1)
        outputs = self._engine.generate("a", params)
        reason = None
        try:
            async with aclosing(outputs):
                for stage, answer in (
                    ("admission", lambda: self._admit(params)),
                    ("compilation", lambda: anext(outputs)),
                    ("masks", lambda: _end(outputs)),
                ):
                    started = time.monotonic()
                    async with asyncio.timeout(_LIMIT):
                        await answer()
                    seconds[stage] = time.monotonic() - started
        except TimeoutError:
            reason = f"{stage} did not answer within {_LIMIT:g} s"
        except Exception as error:
            reason = f"{stage} failed: {bounded(error)}"
        return Readiness(seconds, reason, time.monotonic())

    async def _admit(self, params: SamplingParams) -> None:
        """Admit a request in an admission thread. It cannot be cancelled: a later check waits for the same one."""
        if self._admission is None or self._admission.done():
            admit = self._engine.engine.admit
            self._admission = self._threads.run_small(lambda: admit("ready", "a", params))
        await asyncio.shield(self._admission)


async def _end(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    """Wait for the end of a request, and raise its error."""
    async for output in outputs:
        error = output.error or output.outputs[0].error
        if error is not None:
            raise error
