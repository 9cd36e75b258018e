"""The example in the README, as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_as_printed() -> None:
    command = [sys.executable, "examples/offline.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    lines = found.stdout.splitlines()
    assert len(lines) == 4
    texts = [line.partition(": ")[2] for line in lines]
    assert json.loads(texts[0]).keys() == {"name", "age", "city"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", texts[1])
    assert texts[2] in ("positive", "negative")
    assert re.fullmatch(r"[1-9]( [-+] [1-9])+", texts[3])
