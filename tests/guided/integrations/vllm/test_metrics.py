"""The pool's state, from the process that has the pool to the one that answers
`/metrics`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from byte_vocabulary import BYTES
from prometheus_client import REGISTRY

from guided.integrations.vllm import metrics
from guided.pools.inline import InlinePool


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    metrics.expose()
    return tmp_path


def actors() -> float | None:
    return REGISTRY.get_sample_value("guided_mask_actors")


def wait_for(count: float) -> None:
    until = time.monotonic() + 60
    while actors() != count:
        assert time.monotonic() < until
        time.sleep(0.01)


def report(folder: str, ends: Event) -> None:
    tempfile.tempdir = folder
    metrics.report(InlinePool(BYTES), lambda: False)
    ends.wait(60)


def test_the_pools_of_the_children_of_this_process(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    children = [
        context.Process(target=report, args=(str(folder), ends)) for _ in range(2)
    ]
    assert actors() == 0
    for count, child in enumerate(children):
        child.start()
        wait_for(count + 1)
    ends.set()
    for child in children:
        child.join(60)
    assert actors() == 0
    assert not list(folder.iterdir())


def test_a_file_of_another_kind_is_ignored(folder: Path) -> None:
    (folder / f"guided-vllm-{os.getpid()}.json").write_bytes(b'{"workers": 5}')
    assert actors() == 0
