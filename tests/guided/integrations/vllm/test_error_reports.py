"""Error reports and the run directory: written in one process, taken in another, bounded, removed with the owner."""

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


def test_a_report_of_another_process_is_taken_once(run: Path) -> None:
    _elsewhere(
        "from guided.integrations.vllm import error_reports; from guided.errors import DeadEnd;"
        "error_reports.report('a/../b \\x00', DeadEnd('nothing is allowed', param='regex', pointer='/x'))"
    )
    error = error_reports.take("a/../b \x00")
    assert isinstance(error, DeadEnd)
    assert (error.message, error.param, error.pointer) == ("nothing is allowed", "regex", "/x")
    assert error_reports.take("a/../b \x00") is None
    assert error_reports.take("another") is None


def test_a_later_report_replaces_an_earlier_one(run: Path) -> None:
    error_reports.report("one", DeadEnd("first"))
    error_reports.report("one", MaskTimeout("second"))
    assert str(error_reports.take("one")) == "second"


def test_the_number_of_reports_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_reports, "_MAX_REPORTS", 3)
    for number in range(9):
        error_reports.report(str(number), DeadEnd("x"))
    assert len(os.listdir(run / "ended")) == 3


def test_without_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.VARIABLE, raising=False)
    assert error_reports.take("one") is None
    with pytest.raises(OSError, match="no run directory"):
        error_reports.report("one", DeadEnd("x"))


def test_the_directory_is_private_and_passed_to_workers_on_ray(run: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == f"MINE,{run_directory.VARIABLE},{run_directory.SWITCH}"


def test_a_process_of_the_run_keeps_its_directory_and_another_program_does_not(run: Path) -> None:
    announce_and_find = "from guided.integrations.vllm.run_directory import announce, find; announce(); print(find())"
    child = (
        "import multiprocessing, sys\n"
        "multiprocessing.parent_process = lambda: 'as in processes that vLLM starts'\n" + announce_and_find
    )
    assert _elsewhere(child) == str(run)
    other = _elsewhere(announce_and_find)
    assert other != str(run)
    assert not Path(other).exists(), "it was removed at the end of its program"


def test_the_directory_of_a_killed_run_is_removed(run: Path) -> None:
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
