"""GET /health and /health/live: 200 or 503. `/health` shows the state of the mask
pool."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from engine.server.context import Context
from guided.pools.status import BackendStatus, WorkerStatus

router = APIRouter(tags=["operation"])


class PoolHealth(BaseModel):
    name: str
    trouble: str | None
    """The reason why dead actors are not replaced; null if they are replaced."""
    compiling: int
    quarantined: list[str]
    """Hashes of the constraints that are refused because they have ended several
    actors."""
    backends: list[BackendStatus]
    actors: list[WorkerStatus] = Field(validation_alias="workers")


class Liveness(BaseModel):
    status: Literal["ok", "degraded", "unavailable"]
    reason: str | None = None


class Health(Liveness):
    pool: PoolHealth


@router.get("/health", responses={503: {"model": Health}})
async def health(response: Response, context: Context) -> Health:
    """Report whether the engine runs and at least one mask actor is up. `degraded`: not
    all of them are up."""
    health = context.llm.health()
    reason = None
    if context.shutting_down:
        reason = "shutting down"
    elif not health.alive:
        reason = f"the engine has died: {health.error}"
    elif not health.pool.healthy:
        reason = "no mask actor is up"
        if health.pool.trouble:
            reason += f": {health.pool.trouble}"
    pool = PoolHealth.model_validate(health.pool, from_attributes=True)
    status = _status(reason, response)
    if reason is None and health.pool.degraded is not None:
        status = "degraded"
        reason = health.pool.degraded
    return Health(status=status, reason=reason, pool=pool)


@router.get("/health/live", responses={503: {"model": Liveness}})
async def live(response: Response, context: Context) -> Liveness:
    """Report whether the engine runs. If it does not, the process must be restarted."""
    health = context.llm.health()
    if health.alive:
        reason = None
    else:
        reason = f"the engine has died: {health.error}"
    return Liveness(status=_status(reason, response), reason=reason)


def _status(
    reason: str | None, response: Response
) -> Literal["ok", "degraded", "unavailable"]:
    """Return the status of the body, and set the status of the response."""
    if reason is None:
        return "ok"
    response.status_code = 503
    return "unavailable"
