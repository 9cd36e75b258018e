"""The registry of backends and the constraint kinds of each.

The module of an adapter is imported at its first use (xgrammar alone takes 1.5 s). To
add a backend, write `guided/backends/<name>.py` with a class derived from
`guided.backends.base.Backend`, and add it to `BACKENDS`; the contract tests then cover
it. An adapter must work without torch: see `without_torch.py`.
"""

from __future__ import annotations

import pkgutil
import threading
from dataclasses import dataclass
from typing import cast

from guided.backends.base import Backend
from guided.backends.checked import CheckedBackend
from guided.constraint import KINDS, ConstraintKind
from guided.errors import InvalidRequest, UnsupportedConstraint, bounded
from guided.vocabulary import Vocabulary

__all__ = ["AUTO", "BACKENDS", "Adapter", "Backends", "candidates", "resolve"]

AUTO = "auto"
"""The backend name for llguidance, then xgrammar: the first one that can enforce the
constraint."""


@dataclass(frozen=True)
class Adapter:
    """One entry of the registry."""

    path: str
    """The place of the adapter's class: `module:name`."""
    kinds: frozenset[ConstraintKind]
    """The constraint kinds that the backend supports."""
    aliases: tuple[str, ...] = ()
    named_only: bool = False
    """Used only where it is named: "auto" does not choose it."""
    holds_interpreter_lock: bool = False
    """No other thread gets far while it computes a mask, which may take long."""

    def load(self) -> type[Backend]:
        """Return the class of the adapter; imports its library."""
        return cast("type[Backend]", pkgutil.resolve_name(self.path))


BACKENDS: dict[str, Adapter] = {
    "llguidance": Adapter(
        "guided.backends.llguidance.adapter:LLGuidanceBackend",
        frozenset(KINDS),
        ("guidance",),
    ),
    "xgrammar": Adapter(
        "guided.backends.xgrammar.adapter:XGrammarBackend", frozenset(KINDS)
    ),
    "outlines": Adapter(
        "guided.backends.outlines:OutlinesBackend",
        frozenset({"json_schema", "json_object", "regex", "choice"}),
        ("outlines_core", "outlines-core"),
        named_only=True,
    ),
    "lm-format-enforcer": Adapter(
        "guided.backends.lmformatenforcer:LMFormatEnforcerBackend",
        frozenset({"json_schema", "json_object", "choice"}),
        ("lmfe", "lmformatenforcer", "lm_format_enforcer"),
        named_only=True,
        holds_interpreter_lock=True,
    ),
}
"""Public name -> adapter, in the order of "auto"."""


def resolve(backend: str, *, param: str = "backend") -> str:
    """Return the public name for a name, an alias, or "auto".

    Raises:
        InvalidRequest: there is no such backend; the message lists the known ones.
    """
    if backend == AUTO or backend in BACKENDS:
        return backend
    for name, adapter in BACKENDS.items():
        if backend in adapter.aliases:
            return name
    names = ", ".join((AUTO, *BACKENDS))
    raise InvalidRequest(
        f"there is no backend {bounded(backend, 60)!r}: choose one of {names}",
        param=param,
    )


def candidates(
    kind: ConstraintKind, backend: str = AUTO, *, param: str = "backend"
) -> tuple[str, ...]:
    """Return the backends to try for a constraint of `kind`, in order: the named one,
    or those of "auto".

    Raises:
        InvalidRequest: there is no such backend.
        UnsupportedConstraint: the named backend does not support this kind.
    """
    name = resolve(backend, param=param)
    able = tuple(other for other, adapter in BACKENDS.items() if kind in adapter.kinds)
    if name == AUTO:
        return tuple(other for other in able if not BACKENDS[other].named_only)
    if name not in able:
        raise UnsupportedConstraint(
            f"backend {name!r} does not support {kind!r} constraints; these do: {', '.join(able)}",
            param=param,
        )
    return (name,)


class Backends:
    """The backends for one vocabulary, each with the final check, created at their
    first use. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._made: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def __getitem__(self, backend: str) -> Backend:
        """Return the instance for a public name or an alias, not for "auto". Raises as
        `resolve` does."""
        name = resolve(backend)
        with self._lock:
            if name not in self._made:
                self._made[name] = CheckedBackend(
                    BACKENDS[name].load()(self.vocabulary), self.vocabulary
                )
            return self._made[name]
