"""Compilation of constraints. `Grammars` compiles them, caches the results and has mask actors load them.

The compile processes import this package without Ray, so its entry point is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.compile.grammars import Grammars

__all__ = ["Grammars"]


def __getattr__(name: str) -> Any:
    if name == "Grammars":
        from actors.compile.grammars import Grammars

        return Grammars
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
