"""Whether a worker masks guided requests: told by workers, believed while they live."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guided.embedded import registrations, run_directory
from guided.errors import PoolUnavailable


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path))


def test_without_a_worker_guided_requests_are_refused() -> None:
    """vLLM's V1 runner drops processors of entry points where there is speculative decoding, and tells nobody."""
    with pytest.raises(PoolUnavailable, match="no worker of this engine masks guided requests"):
        registrations.check()


def test_with_one_they_are_not() -> None:
    registrations.register()
    registrations.check()


def test_one_that_can_not_says_why() -> None:
    registrations.register("not with these settings")
    with pytest.raises(PoolUnavailable, match="not with these settings"):
        registrations.check()


def test_a_worker_that_is_gone_counts_no_more(tmp_path: Path) -> None:
    code = "from guided.embedded import registrations as r; r.register(); r.check()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert list((tmp_path / "workers").iterdir())
    with pytest.raises(PoolUnavailable, match="no worker"):
        registrations.check()


def test_another_machines_worker_is_believed(tmp_path: Path) -> None:
    note = {"process": "elsewhere 1 5", "refusal": None}
    run_directory.write_note(tmp_path / "workers", "elsewhere-1", note)
    registrations.check()


def test_what_is_no_registration_is_none(tmp_path: Path) -> None:
    run_directory.write_note(tmp_path / "workers", "x", ["nothing"])
    (tmp_path / "workers" / "y").write_text("{")
    with pytest.raises(PoolUnavailable, match="no worker"):
        registrations.check()


def test_there_is_nowhere_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.VARIABLE)
    with pytest.raises(OSError, match="no run directory"):
        registrations.register()
