"""GET /health, /health/live and /health/ready: 200 or 503. `/health` shows the state of the mask pool."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from engine.sampling_params import SamplingParams
from engine.server.context import Context, ServerContext
from guided.errors import bounded
from guided.pools.protocol import BackendStatus, WorkerStatus

router = APIRouter(tags=["operation"])

_SECONDS = 2.0
"""Time in which a request of one token must end, and for which its result is reused: more probes are no more checks."""


class PoolHealth(BaseModel):
    name: str
    trouble: str | None
    """Why actors that have ended are not replaced; null if they are."""
    compiling: int
    backends: list[BackendStatus]
    actors: list[WorkerStatus] = Field(validation_alias="workers")


class Liveness(BaseModel):
    status: Literal["ok", "unavailable"]
    reason: str | None = None


class Health(Liveness):
    pool: PoolHealth


class ReadinessCheck:
    """Sends a small constrained request through the engine when a probe asks. At most one runs at a time."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._check: asyncio.Task[str | None] | None = None
        self._ended = 0.0
        """`time.monotonic()` of the end of the last check."""

    async def problem(self) -> str | None:
        """Return why the server is not ready, from the last check if that is recent."""
        check = self._check
        if check is None or (check.done() and time.monotonic() - self._ended > _SECONDS):
            check = self._check = asyncio.create_task(self._run())
        return await asyncio.shield(check)

    async def _run(self) -> str | None:
        # A constraint that is not in the cache, and one token of its output.
        number, engine = uuid.uuid4().hex, self._context.engine
        params = SamplingParams(regex=f"ready {number}", backend=self._context.settings.backend, max_tokens=1)
        try:
            async with asyncio.timeout(_SECONDS):
                group = await self._context.in_thread(engine.engine.admit, f"ready-{number}", "a", params)
                async with aclosing(engine.run(group)) as outputs:
                    async for output in outputs:
                        if (error := output.error or output.outputs[0].error) is not None:
                            raise error
        except TimeoutError:
            return f"a request of one token did not end within {_SECONDS:g} s"
        except Exception as error:
            return f"a request of one token failed: {bounded(error)}"
        finally:
            self._ended = time.monotonic()
        return None


@router.get("/health", responses={503: {"model": Health}})
async def health(response: Response, context: Context) -> Health:
    """Report whether the engine runs and at least one mask actor is up."""
    engine = context.engine.health()
    reason = None
    if context.shutting_down:
        reason = "shutting down"
    elif not engine.alive:
        reason = f"the engine has died: {engine.error}"
    elif not engine.pool.healthy:
        reason = "no mask actor is up" + (f": {engine.pool.trouble}" if engine.pool.trouble else "")
    pool = PoolHealth.model_validate(engine.pool, from_attributes=True)
    return Health(status=_status(reason, response), reason=reason, pool=pool)


@router.get("/health/live", responses={503: {"model": Liveness}})
async def live(response: Response, context: Context) -> Liveness:
    """Report whether the engine runs. If not, only a new process helps."""
    engine = context.engine.health()
    reason = None if engine.alive else f"the engine has died: {engine.error}"
    return Liveness(status=_status(reason, response), reason=reason)


@router.get("/health/ready", responses={503: {"model": Liveness}})
async def ready(request: Request, response: Response, context: Context) -> Liveness:
    """Report whether a constrained request of one token ends within two seconds, now or a few seconds ago."""
    check: ReadinessCheck = request.app.state.readiness
    reason = "shutting down" if context.shutting_down else await check.problem()
    return Liveness(status=_status(reason, response), reason=reason)


def _status(reason: str | None, response: Response) -> Literal["ok", "unavailable"]:
    """Return the body's status, and set that of the response."""
    if reason is None:
        return "ok"
    response.status_code = 503
    return "unavailable"
