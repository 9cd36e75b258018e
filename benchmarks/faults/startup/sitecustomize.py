"""Run by every Python process that has this folder on its PYTHONPATH, ours and vLLM's: as soon as `llguidance` is
imported, the matchers of marked grammars get the fault that the environment names (`benchmarks.faults.faulty_matcher`).
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder


class _Patching(Loader):
    def __init__(self, inner):
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        from benchmarks.faults.faulty_matcher import install

        install(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "llguidance":
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
