"""Install the fault that the environment names when `llguidance` is imported (`benchmarks.faults.faulty_matcher`).

Python runs this file at the start of every process that has this folder on its PYTHONPATH, in our environment and
vLLM's.
"""

from __future__ import annotations

from benchmarks.faults.faulty_matcher import install
from benchmarks.import_hook import after_import

after_import("llguidance", install)
