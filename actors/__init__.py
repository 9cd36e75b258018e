"""Where mask workers live when they don't live in the caller: the Ray pool, its channel, its supervision.

Ray is imported where a pool is made, not with the package: the processes that compile do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.ray_pool import RayPool
    from guided.limits import CompileLimits

__all__ = ["CompileLimits", "RayPool"]


def __getattr__(name: str) -> Any:
    if name == "RayPool":
        from actors.ray_pool import RayPool

        return RayPool
    if name == "CompileLimits":
        from guided.limits import CompileLimits

        return CompileLimits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
