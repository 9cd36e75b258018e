"""The example with draft tokens, as a reader runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_as_printed_and_needs_fewer_steps_than_tokens() -> None:
    command = [sys.executable, "examples/draft_tokens.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    answer, figures = found.stdout.splitlines()
    assert json.loads(answer) == {"name": "Anna Weber", "age": 47}
    counts = re.fullmatch(r"(\d+) tokens, (\d+) forward passes", figures)
    assert counts is not None
    assert int(counts[2]) < int(counts[1])
