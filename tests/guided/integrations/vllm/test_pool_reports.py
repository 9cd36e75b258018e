"""The pool's state, from the process that has the pool to the metrics of another."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from guided.integrations.vllm import pool_reports, run_directory
from guided.pools.inline import InlinePool
from guided.pools.protocol import BackendStatus, PoolStatus, WorkerStatus
from guided.vocabulary import Vocabulary

STATUS = PoolStatus(
    "ray",
    [
        WorkerStatus(0, 1, "up", 1, "n", 3, 0, ends={}),
        WorkerStatus(1, 4, "restarting", None, "n", 0, 3, ends={"crash": 2, "memory": 1}),
    ],
    compiling=5,
    backends=[BackendStatus("outlines", crashes=2), BackendStatus("xgrammar", timeouts=1)],
    trouble="there is no memory",
    replays=7,
)
FIGURES = {
    ("guided_mask_actors", ""): 2,
    ("guided_mask_actors_up", ""): 1,
    ("guided_mask_open_sequences", ""): 3,
    ("guided_grammar_compiling", ""): 5,
    ("guided_mask_replays_total", ""): 7,
    ("guided_mask_actor_restarts_total", ""): 3,
    ("guided_compile_crashes_total", "outlines"): 2,
    ("guided_compile_timeouts_total", "xgrammar"): 1,
    ("guided_mask_actor_ends_total", "crash"): 2,
}
VOCABULARY = Vocabulary((b"</s>", b"a"), (0,), frozenset({0}), 32)


class Pool(InlinePool):
    def status(self) -> PoolStatus:
        return STATUS


def value(name: str, label: str) -> float | None:
    labels = {"backend" if "backend" in name or "compile" in name else "cause": label} if label else {}
    return REGISTRY.get_sample_value(name, labels)


def test_the_state_of_running_pools_is_logged_and_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path))
    monkeypatch.setattr(pool_reports, "REPORT_SECONDS", 0.01)
    caplog.set_level(logging.INFO, "guided.integrations")
    pool_reports.expose()
    pool_reports.expose()
    pool = Pool(VOCABULARY)
    pool_reports.start(pool)
    until = time.monotonic() + 60
    while value("guided_mask_actors", "") != 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert {place: value(*place) for place in FIGURES} == FIGURES
    assert "1 of 2 workers of the mask pool are up: there is no memory" in caplog.messages
    del pool
    gc.collect()


def test_pools_of_processes_that_ended_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path))
    code = (
        "import os; from guided.integrations.vllm.run_directory import identity, write_note;"
        "write_note('pools', 'x', {'process': identity(os.getpid()), 'status': {'name': 'ray', 'replays': 9}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    pool_reports.expose()
    assert value("guided_mask_replays_total", "") == 0
