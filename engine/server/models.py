"""GET /v1/models, /v1/models/{name}, /version."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter

from engine.server.context import Context, ServerContext
from engine.server.protocol import ModelCard, ModelList

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(context: Context) -> ModelList:
    """List the served model under each of its names."""
    return ModelList(data=[_card(context, name) for name in context.settings.model_names])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context) -> ModelCard:
    context.check_model(name)
    return _card(context, name)


@router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": version("guided")}


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=context.created, root=context.model_name, max_model_len=context.engine.max_model_len
    )
