"""The registry of backends: which there are, which constraint kinds each can do, and how to get one.

Importing this imports no grammar library: an adapter's module is imported when it is first used (xgrammar alone takes
1.5 s). To add a backend, write `guided/backends/<name>.py` with a class that keeps `guided.backends.base.Backend`'s
contract, and add one line to `BACKENDS`; the contract tests pick it up. An adapter does without torch: a pool's own
processes may keep it out.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from guided.backends.base import Backend
from guided.backends.mask_cache import MASK_CACHE_BYTES, MaskCache
from guided.constraint import KINDS, ConstraintKind
from guided.errors import InvalidRequest, UnsupportedConstraint, bounded
from guided.vocabulary import Vocabulary

__all__ = ["AUTO", "BACKENDS", "Adapter", "Backends", "candidates", "resolve"]

AUTO = "auto"
"""The backend name that stands for "whichever can"."""


@dataclass(frozen=True)
class Adapter:
    """One line of the registry. `kinds` is the backend's row of the capability matrix."""

    module: str
    attribute: str
    kinds: frozenset[ConstraintKind]
    aliases: tuple[str, ...] = ()
    keeps_masks: bool = False
    """Its class takes a `MaskCache` too: its masks take longer than copying one."""

    def load(self) -> type[Backend]:
        """The adapter's class; imports its library."""
        return cast("type[Backend]", getattr(importlib.import_module(self.module), self.attribute))


BACKENDS: dict[str, Adapter] = {
    "llguidance": Adapter(
        "guided.backends.llguidance",
        "LLGuidanceBackend",
        frozenset(KINDS),
        ("guidance",),
    ),
    "xgrammar": Adapter(
        "guided.backends.xgrammar",
        "XGrammarBackend",
        frozenset(KINDS),
    ),
    "outlines": Adapter(
        "guided.backends.outlines",
        "OutlinesBackend",
        frozenset({"json_schema", "regex", "choice"}),
        ("outlines_core", "outlines-core"),
        keeps_masks=True,
    ),
    "lm-format-enforcer": Adapter(
        "guided.backends.lmformatenforcer",
        "LMFormatEnforcerBackend",
        frozenset({"json_schema", "json_object", "regex", "choice"}),
        ("lmfe", "lmformatenforcer", "lm_format_enforcer"),
        keeps_masks=True,
    ),
}
"""Public name -> adapter, in the order in which "auto" tries them."""


def resolve(backend: str, *, param: str = "backend") -> str:
    """The public name that `backend` (a name or an alias, or "auto") stands for.

    Raises:
        InvalidRequest: there is no such backend; the message lists those there are.
    """
    if backend == AUTO or backend in BACKENDS:
        return backend
    for name, adapter in BACKENDS.items():
        if backend in adapter.aliases:
            return name
    names = ", ".join((AUTO, *BACKENDS))
    raise InvalidRequest(f"there is no backend {bounded(backend, 60)!r}: choose one of {names}", param=param)


def candidates(kind: ConstraintKind, backend: str = AUTO, *, param: str = "backend") -> tuple[str, ...]:
    """The backends to try for a constraint of `kind`, best first: one where the request names it, else all that can.

    Raises:
        InvalidRequest: there is no such backend.
        UnsupportedConstraint: the named backend can't do this kind.
    """
    name = resolve(backend, param=param)
    able = tuple(other for other, adapter in BACKENDS.items() if kind in adapter.kinds)
    if name == AUTO:
        return able
    if name not in able:
        raise UnsupportedConstraint(
            f"backend {name!r} does not support {kind!r} constraints; these do: {', '.join(able)}", param=param
        )
    return (name,)


class Backends:
    """One `Backend` instance a name, for one vocabulary, each made when it is first asked for. Thread-safe.

    Args:
        mask_cache_bytes: what the masks that are kept may come to, of all backends and grammars together.
    """

    def __init__(self, vocabulary: Vocabulary, mask_cache_bytes: int = MASK_CACHE_BYTES) -> None:
        self.vocabulary = vocabulary
        self.masks = MaskCache(mask_cache_bytes)
        self._made: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def __getitem__(self, backend: str) -> Backend:
        """The instance for a public name or alias ("auto" is none: see `candidates`).

        Raises:
            InvalidRequest: there is no such backend.
        """
        name = resolve(backend)
        if name == AUTO:
            raise InvalidRequest("'auto' names no backend by itself", param="backend")
        with self._lock:
            if name not in self._made:
                make: Callable[..., Backend] = BACKENDS[name].load()
                kept = (self.masks,) if BACKENDS[name].keeps_masks else ()
                self._made[name] = make(self.vocabulary, *kept)
            return self._made[name]
