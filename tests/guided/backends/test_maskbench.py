"""MaskBench's schemas and instances: a backend refuses a schema, or decides its instances correctly.

The data are not part of the project: a sample of 1,125 schemas in `shared/data`, next to the checkout.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.maskbench import judge_all, main
from benchmarks.workload import DATA, read_rows
from guided.backends import BACKENDS
from guided.vocabulary import Vocabulary

SAMPLE = 60
LONGEST = {"xgrammar": 2000, "outlines": 400}
"""Maximum characters of a schema, for backends that may compile for minutes."""
ENTRIES = [
    {"id": "a", "schema": {"type": "integer"}, "tests": [{"valid": True, "data": 1}, {"valid": False, "data": "x"}]},
    {"id": "b", "schema": {"type": "text"}, "tests": []},
    {"id": "c", "schema": {"type": "integer"}, "tests": [{"valid": False, "data": 1}]},
]


@pytest.mark.skipif(not DATA.exists(), reason="the development data (shared/data) are not here")
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_maskbench_sample(backend: str, vocabulary: Vocabulary, capsys: pytest.CaptureFixture[str]) -> None:
    sample = random.Random(1).sample(read_rows(DATA), SAMPLE)
    short = [entry for entry in sample if len(json.dumps(entry["schema"])) <= LONGEST.get(backend, 10**9)]
    results = list(judge_all(short, vocabulary, [backend], seconds=2.0))
    outcomes = Counter(result.outcome for result in results)
    with capsys.disabled():
        print(f"\n{backend}: {dict(outcomes)}")
    assert outcomes["passes"] >= len(short) / 2
    assert [result.reason for result in results if result.outcome in ("accepts invalid", "error")] == []
    assert outcomes["rejects valid"] <= len(short) / 10
    assert outcomes["timeout"] <= len(short) / 10


def test_out_has_one_line_per_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "bench.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
    with pytest.raises(SystemExit) as end:
        main(["--data", str(data), "--lines", str(out), "--out", str(tmp_path)])
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "VIOLATION: c accepts 1\n" in printed
    assert 'refused by keyword: {"type": 1}\n' in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [row["outcome"] for row in rows] == ["passes", "refused", "accepts invalid"]
    assert rows[0].keys() == rows[1].keys()
    assert (rows[0]["backend"], rows[0]["checked"], rows[1]["pointer"]) == ("llguidance", [], "/type")
    assert rows[0]["mask [us]"] > 0
    assert rows[1]["first mask [ms]"] is None
