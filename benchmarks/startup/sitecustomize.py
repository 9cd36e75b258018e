"""Install the faults of `benchmarks.injected_faults`.

Python runs this file at the start of every process that has this folder on its
PYTHONPATH, in every environment. Actors, compile processes and vLLM's engine process
inherit the variable from the benchmark.
"""

from __future__ import annotations

from benchmarks.injected_faults import install

install()
