"""The examples that print their outputs, as a reader runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from script_host import ScriptHost

ROOT = Path(__file__).parents[2]


def test_each_offline_answer_satisfies_its_constraint(script_host: ScriptHost) -> None:
    lines = script_host.run(ROOT / "examples/offline.py", ROOT).splitlines()
    person, date, mood, expression = (line.partition(": ")[2] for line in lines)
    assert json.loads(person).keys() == {"name", "age", "city"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert mood in ("positive", "negative")
    assert re.fullmatch(r"[1-9]( [-+] [1-9])+", expression)


def test_draft_tokens_need_fewer_steps_than_tokens(script_host: ScriptHost) -> None:
    answer, figures = script_host.run(ROOT / "examples/draft_tokens.py", ROOT).splitlines()
    assert json.loads(answer) == {"name": "Anna Weber", "age": 47}
    counts = re.fullmatch(r"(\d+) tokens, (\d+) forward passes", figures)
    assert counts is not None
    assert int(counts[2]) < int(counts[1])
