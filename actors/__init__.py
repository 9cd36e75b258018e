"""Where mask workers live when they don't live in the caller: the Ray pool, its channel, its supervision."""

from __future__ import annotations

from actors.compiler import CompileLimits
from actors.ray_pool import RayPool

__all__ = ["CompileLimits", "RayPool"]
