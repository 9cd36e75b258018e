"""GET /health: 200 while requests can be served, 503 when not, and what the mask pool looks like either way."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from engine.server.context import Context

__all__ = ["router"]

router = APIRouter(tags=["operation"])


class MaskActor(BaseModel):
    """One worker of the mask pool; with the inline pool the only one, in the server's own process."""

    index: int
    state: Literal["starting", "up", "restarting", "down"]
    pid: int | None
    node: str | None
    incarnation: int
    restarts: int
    last_end: str | None
    """What became of the last process that ended here."""
    open_sequences: int


class CompileBackend(BaseModel):
    """A grammar library, where constraints are compiled: `suspended` after several crashes, for `seconds_left`."""

    name: str
    state: Literal["up", "suspended"]
    seconds_left: float
    crashes: int
    timeouts: int


class PoolHealth(BaseModel):
    name: str
    trouble: str | None
    """What keeps actors that end from being replaced, where something does."""
    compiling: int
    backends: list[CompileBackend]
    actors: list[MaskActor]


class Health(BaseModel):
    status: Literal["ok", "unavailable"]
    reason: str | None = None
    pool: PoolHealth


@router.get("/health", responses={503: {"model": Health}})
async def health(response: Response, context: Context) -> Health:
    """Whether the engine runs and at least one mask actor is up."""
    engine = context.engine.health()
    pool = engine.pool
    reason = None
    if context.shutting_down:
        reason = "shutting down"
    elif not engine.alive:
        reason = f"the engine has died: {engine.error}"
    elif not pool.healthy:
        reason = "no mask actor is up" + (f": {pool.trouble}" if pool.trouble else "")
    if reason is not None:
        response.status_code = 503
    actors = [
        MaskActor(
            index=worker.index,
            state=worker.state,
            pid=worker.pid,
            node=worker.node,
            incarnation=worker.incarnation,
            restarts=worker.restarts,
            last_end=worker.last_end,
            open_sequences=worker.open_sequences,
        )
        for worker in pool.workers
    ]
    backends = [
        CompileBackend(
            name=backend.name,
            state=backend.state,
            seconds_left=round(backend.seconds_left, 1),
            crashes=backend.crashes,
            timeouts=backend.timeouts,
        )
        for backend in pool.backends
    ]
    return Health(
        status="ok" if reason is None else "unavailable",
        reason=reason,
        pool=PoolHealth(
            name=pool.name, trouble=pool.trouble, compiling=pool.compiling, backends=backends, actors=actors
        ),
    )
