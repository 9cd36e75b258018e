"""The examples that print their outputs, as a reader runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(example: str) -> list[str]:
    """Return the lines that an example prints."""
    command = [sys.executable, f"examples/{example}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    return found.stdout.splitlines()


def test_each_offline_answer_satisfies_its_constraint() -> None:
    person, date, mood, expression = (line.partition(": ")[2] for line in printed("offline.py"))
    assert json.loads(person).keys() == {"name", "age", "city"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert mood in ("positive", "negative")
    assert re.fullmatch(r"[1-9]( [-+] [1-9])+", expression)


def test_draft_tokens_need_fewer_steps_than_tokens() -> None:
    answer, figures = printed("draft_tokens.py")
    assert json.loads(answer) == {"name": "Anna Weber", "age": 47}
    counts = re.fullmatch(r"(\d+) tokens, (\d+) forward passes", figures)
    assert counts is not None
    assert int(counts[2]) < int(counts[1])
