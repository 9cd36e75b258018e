"""The registry of workers that mask guided requests: an entry counts while its process is alive."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from guided.errors import PoolUnavailable
from guided.integrations.vllm import run_directory, worker_registry


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path))


def test_without_a_worker_guided_requests_are_rejected() -> None:
    """With speculative decoding, vLLM's V1 runner silently drops processors of entry points."""
    with pytest.raises(PoolUnavailable, match=r"no worker of this engine masks guided requests.*GUIDED_VLLM_DIR"):
        worker_registry.check()


def test_with_a_worker_they_are_not() -> None:
    worker_registry.register()
    worker_registry.check()


def test_a_worker_that_cannot_mask_gives_the_reason() -> None:
    worker_registry.register("not with these settings")
    with pytest.raises(PoolUnavailable, match="not with these settings"):
        worker_registry.check()


def test_a_worker_that_has_ended_does_not_count(tmp_path: Path) -> None:
    code = "from guided.integrations.vllm import worker_registry as r; r.register(); r.check()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert list((tmp_path / "workers").iterdir())
    with pytest.raises(PoolUnavailable, match="no worker"):
        worker_registry.check()


def test_a_worker_of_another_machine_counts() -> None:
    note = {"process": "elsewhere 1 5", "rejection": None}
    run_directory.write_note("workers", "elsewhere-1", note)
    worker_registry.check()


WAITS = "import sys, subprocess, time; "
IDLE = WAITS + "time.sleep(3600)"
REGISTERS = "from guided.integrations.vllm.worker_registry import register; register(engine='{0}'); "
WORKS = WAITS + REGISTERS + "time.sleep(3600)"
HAS_A_WORKER = WAITS + f"""subprocess.run([sys.executable, '-c', "import time; {REGISTERS}time.sleep(3600)"])"""


class TestSeveralEnginesOfOneProcess:
    """vLLM does not tell `validate_params` which engine a request is for."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[[str, bool], Any]]:
        """Start a process as vLLM starts its engines; wait until it has registered."""
        with ExitStack() as stack:

            def started(code: str, registers: bool) -> Any:
                notes = len(list(tmp_path.glob("workers/[!.]*")))
                process = get_context("spawn").Process(target=exec, args=(code,), name="EngineCore_DP0", daemon=True)
                process.start()
                stack.callback(end, process)
                while registers and len(list(tmp_path.glob("workers/[!.]*"))) == notes:
                    assert process.is_alive()
                    time.sleep(0.02)
                return process

            yield started

    def test_a_worker_of_another_engine_does_not_count(self, start: Callable[[str, bool], Any]) -> None:
        start(WORKS.format("a"), True)
        worker_registry.check()
        second = start(IDLE, False)
        with pytest.raises(PoolUnavailable, match="several engines, and one of them has no worker"):
            worker_registry.check()
        end(second)
        worker_registry.check()

    def test_all_with_workers(self, start: Callable[[str, bool], Any]) -> None:
        """One engine is its own worker, the other has started one."""
        start(WORKS.format("a"), True)
        start(HAS_A_WORKER.format("b"), True)
        worker_registry.check()

    def test_workers_that_ray_started_are_counted_by_their_engine(self, start: Callable[[str, bool], Any]) -> None:
        def register_elsewhere(worker: int, engine: str) -> None:
            note = {"process": f"elsewhere {worker} 5", "rejection": None, "engine": engine, "parents": []}
            run_directory.write_note("workers", f"elsewhere-{worker}", note)

        start(IDLE, False)
        start(IDLE, False)
        register_elsewhere(1, "a")
        register_elsewhere(2, "a")
        with pytest.raises(PoolUnavailable, match="several engines"):
            worker_registry.check()
        register_elsewhere(3, "b")
        worker_registry.check()

    def test_a_worker_in_this_process_counts_for_no_other_engine(self, start: Callable[[str, bool], Any]) -> None:
        worker_registry.register(engine="a")
        start(IDLE, False)
        with pytest.raises(PoolUnavailable, match="several engines"):
            worker_registry.check()


def end(process: Any) -> None:
    for child in psutil.Process(process.pid).children(recursive=True) if process.is_alive() else ():
        child.kill()
    process.kill()
    process.join()


def test_invalid_notes_do_not_count(tmp_path: Path) -> None:
    run_directory.write_note("workers", "x", ["nothing"])
    (tmp_path / "workers" / "y").write_text("{")
    with pytest.raises(PoolUnavailable, match="no worker"):
        worker_registry.check()


def test_without_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.VARIABLE)
    with pytest.raises(OSError, match="no run directory"):
        worker_registry.register()
