"""Register the benchmarks' slow backends when `guided.backends` is imported.

Python runs this file at the start of every process that has this folder on its PYTHONPATH.
"""

from __future__ import annotations

from types import ModuleType

from benchmarks.import_hook import after_import


def _register(backends: ModuleType) -> None:
    from guided.constraint import KINDS

    for kind, attribute in (("sleep", "SleepingBackend"), ("hold", "HoldingBackend")):
        adapter = backends.Adapter("benchmarks.slow_backend", attribute, frozenset(KINDS))
        backends.BACKENDS[f"benchmark-{kind}"] = adapter


after_import("guided.backends", _register)
