"""Import of grammar libraries without torch and transformers, which are not needed to compute masks.

xgrammar and lm-format-enforcer import torch, and xgrammar also transformers, for features other than masks: two seconds
and a quarter of a gigabyte in every process. `leave_out_torch` makes torch unavailable. lm-format-enforcer and tvm-ffi
work without it. xgrammar gets placeholders while it is imported; if it needs more, it gets the real packages.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, cast

_HEAVY = ("torch", "transformers")
_log = logging.getLogger(__name__)


def leave_out_torch() -> None:
    """Make torch unavailable in this process, unless it is already imported. Idempotent."""
    if not any(name in sys.modules for name in _HEAVY):
        cast("dict[str, Any]", sys.modules)["torch"] = None
        sys.meta_path.insert(0, _XGrammarFinder())


class _Placeholder(ModuleType):
    """A module in which every attribute is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _XGrammarFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "xgrammar" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _XGrammarLoader(spec.loader)
        return spec


class _XGrammarLoader(Loader):
    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module("tvm_ffi")  # before the placeholders: it inspects torch
        try:
            with _placeholders():
                self._usual.exec_module(module)
        except Exception as error:
            _log.warning("xgrammar is imported with torch and transformers: %r", error)
            del sys.modules["torch"]
            for name in [name for name in sys.modules if name.startswith("xgrammar.")]:
                del sys.modules[name]
            self._usual.exec_module(module)


@contextmanager
def _placeholders() -> Iterator[None]:
    modules = cast("dict[str, Any]", sys.modules)
    before = {name: modules.get(name, modules) for name in _HEAVY}
    modules.update((name, _Placeholder(name)) for name in _HEAVY)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is modules:
                del modules[name]
            else:
                modules[name] = module
