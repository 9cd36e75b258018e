"""MaskBench's schemas and instances: a backend refuses a schema, or decides its
instances correctly.

The data are not part of the project: a sample of 1,125 schemas in `shared/data`, next
to the checkout.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from benchmarks.maskbench import judge_all
from benchmarks.workload import DATA, read_rows
from guided.backends import BACKENDS
from guided.vocabulary import Vocabulary

SAMPLE = 40
LONGEST = {"xgrammar": 1000, "outlines": 400, "lm-format-enforcer": 1000}
"""Maximum characters of a schema, for backends that may compile for minutes."""


@pytest.mark.skipif(
    not DATA.exists(), reason="the development data (shared/data) are not here"
)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_maskbench_sample(
    backend: str, vocabulary: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = random.Random(1).sample(read_rows(DATA), SAMPLE)
    short = [
        entry
        for entry in sample
        if len(json.dumps(entry["schema"])) <= LONGEST.get(backend, 10**9)
    ]
    results = list(judge_all(short, vocabulary, [backend], seconds=10.0))
    outcomes = Counter(result.outcome for result in results)
    with capsys.disabled():
        print(f"\n{backend}: {dict(outcomes)}")
    assert outcomes["passes"] >= len(short) / 2
    assert [
        result.reason
        for result in results
        if result.outcome in ("accepts invalid", "error")
    ] == []
    assert outcomes["rejects valid"] <= max(1, len(short) / 10)
    assert outcomes["timeout"] <= max(1, len(short) / 10)
