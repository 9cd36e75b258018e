"""MaskBench's schemas and instances: a backend refuses a schema, or decides its instances correctly.

The data are not part of the project: a sample of 1,125 schemas in `shared/data`, next to the checkout.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from guided.backends import BACKENDS, Backends
from guided.backends.base import CompiledGrammar
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected
from guided.vocabulary import Vocabulary

DATA = Path(__file__).parents[4] / "shared" / "data" / "maskbench-dev.jsonl.gz"
SAMPLE = 60
BUDGET_SECONDS = 20.0
SLOW = {"xgrammar", "outlines"}
"""Backends that may compile for minutes. Only the end of their process stops them."""

COMPILE = """
import sys, json
from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary
size = int(sys.stdin.buffer.readline())
backend = Backends(Vocabulary.from_bytes(sys.stdin.buffer.read(size)))[sys.argv[1]]
for line in sys.stdin.buffer:
    try:
        backend.compile(Constraint.json_schema(json.loads(line)))
    except GuidedError:
        pass
    print("done", flush=True)
"""


def compile_in_time(backend: str, vocabulary: Vocabulary, schemas: list[Any]) -> int:
    """Return how many of `schemas` a separate process compiles within the budget."""
    packed = vocabulary.to_bytes()
    text = b"%d\n" % len(packed) + packed + "".join(json.dumps(schema) + "\n" for schema in schemas).encode()
    command = [sys.executable, "-c", COMPILE, backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            done, _ = process.communicate(text, timeout=BUDGET_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            done, _ = process.communicate()
    return done.count(b"done")


def accepts(grammar: CompiledGrammar, vocabulary: Vocabulary, document: Any) -> bool:
    matcher = grammar.matcher()
    try:
        matcher.accept_tokens(vocabulary.encode(json.dumps(document, ensure_ascii=False)))
    except TokenRejected:
        return False
    return matcher.is_accepting()


@pytest.mark.skipif(not DATA.exists(), reason="the development data (shared/data) are not here")
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_maskbench_sample(backend: str, vocabulary: Vocabulary, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    sample = random.Random(1).sample(entries, SAMPLE)
    if backend in SLOW:
        sample.sort(key=lambda entry: len(json.dumps(entry["schema"])))
        sample = sample[: compile_in_time(backend, vocabulary, [entry["schema"] for entry in sample])]
    chosen = Backends(vocabulary)[backend]
    counts = dict.fromkeys(("schemas", "refused", "right", "accepts invalid", "rejects valid"), 0)
    for entry in sample:
        counts["schemas"] += 1
        try:
            grammar = chosen.compile(Constraint.json_schema(entry["schema"]))
        except InvalidConstraint:
            counts["refused"] += 1
            continue
        wrong = [case for case in entry["tests"] if accepts(grammar, vocabulary, case["data"]) != case["valid"]]
        counts["right"] += not wrong
        counts["accepts invalid"] += any(not case["valid"] for case in wrong)
        counts["rejects valid"] += any(case["valid"] for case in wrong)
    with capsys.disabled():
        print(f"\n{backend}: {counts}")
    assert counts["right"] >= counts["schemas"] / 3
    assert counts["accepts invalid"] == 0
    assert counts["rejects valid"] <= counts["schemas"] / 10
