"""Register `faulty_backend` when `guided.backends` is imported.

Python runs this file at the start of every process that has this folder on its
PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Registering(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        # Named, not imported: it imports this module.
        module.BACKENDS["faulty"] = module.Adapter(
            "faulty_backend:FaultyBackend", frozenset({"regex"})
        )


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "guided.backends":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
