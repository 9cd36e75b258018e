"""Mask workers in Ray actors: the pool, its channels, its compilation and its
supervision.

The pool is imported when it is first used: actors and compile processes do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from guided.limits import CompileLimits

if TYPE_CHECKING:
    from actors.ray_pool import RayPool

__all__ = ["CompileLimits", "RayPool"]


def __getattr__(name: str) -> Any:
    if name != "RayPool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from actors.ray_pool import RayPool

    return RayPool
