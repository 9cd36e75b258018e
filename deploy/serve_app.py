"""The Ray Serve application: the FastAPI application of `guided serve` as ingress, with
a mask pool of its own.

    serve run deploy/serve.yaml                                       # settings from a file
    serve run deploy.serve_app:app model=PATH num_actors=4            # settings from the command line

Each replica is one engine with its own mask pool, in the Ray cluster that Ray Serve
runs on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from deploy.arguments import placement_group, read_arguments
from deploy.ray_metrics import export_to_ray
from engine.server.app import create_app
from engine.server.context import ServerContext
from engine.server.logs import log_to_stderr
from engine.server.options import ServeOptions, take_api_key
from engine.server.process import settings_of, start_engine

_NO_MASKS_SECONDS = 60.0
"""A replica without a mask actor for this time is replaced. Until then its pool tries
to start actors."""
logger = logging.getLogger("ray.serve")


@serve.ingress()
class GuidedServer:
    """One replica: model, engine, mask pool, HTTP application."""

    def __init__(self, options: ServeOptions) -> None:
        log_to_stderr(options.log_level, options.log_format)
        options = _in_group(take_api_key(options))
        if not options.server.api_keys:
            logger.warning(
                "requests need no API key: set api_key_file, or GUIDED_API_KEY in Ray's environment"
            )
        self._engine = start_engine(options)
        self._settings = settings_of(options)
        self._last_healthy = time.monotonic()

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._engine, self._settings)
        app.openapi()  # FastAPI caches the schema, which takes half a second
        context: ServerContext = app.state.context
        export_to_ray(context.metrics.registry)
        return app

    def check_health(self) -> None:
        """Raise if the engine's thread has died, or no mask actor is up: Ray Serve then
        replaces the replica."""
        health = self._engine.health()
        if not health.alive:
            raise RuntimeError(f"the engine has died: {health.error}")
        now = time.monotonic()
        if health.pool.healthy:
            self._last_healthy = now
        elif now - self._last_healthy > _NO_MASKS_SECONDS:
            raise RuntimeError(
                f"no mask actor has been up for {now - self._last_healthy:.0f} s: {health.pool.trouble}"
            )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # missing if the engine did not start
            self._engine.shutdown()


def _in_group(options: ServeOptions) -> ServeOptions:
    """Place the pool's actors in the placement group of this replica."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return options
    return replace(
        options, ray=replace(options.ray, placement=f"group:{group.id.hex()}")
    )


def app(given: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run deploy.serve_app:app`. `given` has fields of
    `Arguments`, or their text."""
    resources, options = read_arguments(given)
    deployment = serve.deployment(
        GuidedServer,
        name="GuidedServer",
        health_check_period_s=5,
        graceful_shutdown_timeout_s=options.grace_seconds,
        ray_actor_options=resources,
        **placement_group(resources, options),
        # At its own limit the application answers 503 in OpenAI's shape. Ray Serve's
        # limit must be higher.
        max_ongoing_requests=2 * options.server.max_requests,
    )
    application: serve.Application = deployment.bind(options)
    return application
