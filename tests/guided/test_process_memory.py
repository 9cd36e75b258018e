"""Freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys


def test_freed_memory_is_given_back() -> None:
    pieces = 300_000
    script = f"""
import time
from pathlib import Path
from guided.process_resources import watch_free_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
watch_free_memory()
held = [bytearray(1000) for _ in range({pieces})]
time.sleep(2)  # it is looked at while it is in use
last = held[-1]  # keeps the top of the heap in use
del held
before = resident()
deadline = time.monotonic() + 60
while (less := before - resident()) < {500 * pieces} and time.monotonic() < deadline:
    time.sleep(0.1)
print(less)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 500 * pieces
