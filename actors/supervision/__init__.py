"""Supervision of mask actors. A `Supervisor` keeps one of a pool's actors alive, with the pool's `IncarnationSettings`.

Imported when first used: the compile actor needs `actors.supervision.process` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.supervision.supervisor import IncarnationSettings, Supervisor

__all__ = ["IncarnationSettings", "Supervisor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from actors.supervision import supervisor

        return getattr(supervisor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
