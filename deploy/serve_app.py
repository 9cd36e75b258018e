"""The Ray Serve application: the same FastAPI application as `guided serve`'s as ingress, the mask pool beside it.

    serve run deploy/serve.yaml                                       # settings from a file
    serve run deploy.serve_app:app model=PATH num_actors=4            # settings from the command line

Each replica is one engine with a mask pool of its own, placed on its node, in the Ray cluster that Serve runs on.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve

from engine.server.app import create_app
from engine.server.process import ServeOptions, start_engine

__all__ = ["Arguments", "GuidedServer", "app"]


class Arguments(BaseModel):
    """What `args` in the configuration, or `name=value` on the command line, may hold; see `guided serve --help`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    num_actors: int | None = None
    backend: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_requests: int = 1024
    mask_limit: float = 5.0
    max_replays: int = 0
    pool_wait: float = 30.0
    device: str = "auto"
    dtype: str = "auto"
    logits_processors: tuple[str, ...] = ()
    api_key: str | None = None
    served_model_name: str | None = None
    num_cpus: float = 1
    """CPUs that Ray reserves for a replica."""
    num_gpus: float = 0
    """GPUs that Ray reserves for a replica; it sees no others."""

    @property
    def options(self) -> ServeOptions:
        return ServeOptions(pool="ray", **self.model_dump(exclude={"num_cpus", "num_gpus"}))


@serve.ingress()
class GuidedServer:
    """One replica: model, engine, mask pool, HTTP application."""

    def __init__(self, options: ServeOptions) -> None:
        self._engine = start_engine(options)
        self._settings = options.settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._engine, self._settings)

    def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises. Mask actors that are down come back by themselves."""
        health = self._engine.health()
        if not health.alive:
            raise RuntimeError(f"the engine has died: {health.error}")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # it is not there where starting it failed
            self._engine.shutdown()


def app(given: dict[str, Any]) -> serve.Application:
    """What `serve run deploy.serve_app:app` runs; `given` holds fields of `Arguments`, or strings of them."""
    arguments = Arguments.model_validate(given)
    actor_options: dict[str, Any] = {"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus}
    deployment = serve.deployment(
        GuidedServer,
        name="GuidedServer",
        health_check_period_s=5,
        graceful_shutdown_timeout_s=30,
        ray_actor_options=actor_options,
        # The application has its own limit, which is answered with 429 in OpenAI's shape; Serve's must not come first.
        max_ongoing_requests=2 * arguments.max_requests,
    )
    application: serve.Application = deployment.bind(arguments.options)
    return application
