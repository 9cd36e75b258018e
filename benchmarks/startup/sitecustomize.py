"""Run by every Python process that has this folder on its PYTHONPATH: registers the benchmarks' slow backends as soon
as `guided.backends` is imported, and does nothing where it isn't."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder


class _Registering(Loader):
    def __init__(self, inner):
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        from guided.constraint import KINDS

        for kind, attribute in (("sleep", "SleepingBackend"), ("hold", "HoldingBackend")):
            adapter = module.Adapter("benchmarks.slow_backend", attribute, frozenset(KINDS))
            module.BACKENDS[f"benchmark-{kind}"] = adapter


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "guided.backends":
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
