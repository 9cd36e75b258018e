"""Statuses and the run directory: written in one process, taken in another, bounded, gone with their owner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guided.errors import DeadEnd, MaskTimeout
from guided.integrations.vllm import error_reports, run_directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(run_directory.VARIABLE, "")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    run_directory.announce()
    path = run_directory.find()
    assert path is not None
    return path


def _elsewhere(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_an_error_comes_as_it_was_reported_by_another_process_once(run: Path) -> None:
    _elsewhere(
        "from guided.integrations.vllm import error_reports; from guided.errors import DeadEnd;"
        "error_reports.report('a/../b \\x00', DeadEnd('nothing is allowed', param='regex', pointer='/x'))"
    )
    error = error_reports.take("a/../b \x00")
    assert isinstance(error, DeadEnd)
    assert (error.message, error.param, error.pointer) == ("nothing is allowed", "regex", "/x")
    assert error_reports.take("a/../b \x00") is None
    assert error_reports.take("another") is None


def test_the_last_report_counts(run: Path) -> None:
    error_reports.report("one", DeadEnd("first"))
    error_reports.report("one", MaskTimeout("second"))
    assert str(error_reports.take("one")) == "second"


def test_what_nobody_takes_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_reports, "_MOST", 3)
    for number in range(9):
        error_reports.report(str(number), DeadEnd("x"))
    assert len(os.listdir(run / "ended")) == 3


def test_nothing_is_there_without_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.VARIABLE, raising=False)
    assert error_reports.take("one") is None
    with pytest.raises(OSError, match="no run directory"):
        error_reports.report("one", DeadEnd("x"))


def test_the_directory_is_private_and_named_to_workers_on_ray(run: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == f"MINE,{run_directory.VARIABLE}"


def test_a_process_of_the_run_keeps_its_directory_and_a_program_of_its_own_does_not(run: Path) -> None:
    announce_and_find = "from guided.integrations.vllm.run_directory import announce, find; announce(); print(find())"
    child = (
        "import multiprocessing, sys\n"
        "multiprocessing.parent_process = lambda: 'vLLM starts its processes so'\n" + announce_and_find
    )
    assert _elsewhere(child) == str(run)
    other = _elsewhere(announce_and_find)
    assert other != str(run)
    assert not Path(other).exists(), "it ended, and its directory with it"


def test_what_a_killed_run_left_is_swept(run: Path) -> None:
    left = _elsewhere(
        "import os; os.environ['GUIDED_VLLM_DIR'] = ''\n"
        "from guided.integrations.vllm.run_directory import announce, find; announce(); print(find(), flush=True); "
        "os._exit(0)"
    )
    assert Path(left).exists()
    os.environ[run_directory.VARIABLE] = ""
    run_directory.announce()
    assert not Path(left).exists()
    assert run.exists()


def test_a_directory_made_by_hand_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path))
    run_directory.announce()
    assert run_directory.find() == tmp_path
