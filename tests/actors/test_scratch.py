"""Scratch directories: they do not outlive their process, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driven_pool import until

from actors.scratch import ScratchDirectory

ROOT = Path(__file__).parents[2]
OWNER = "from actors.scratch import ScratchDirectory as S; s = S(); print(s.path, flush=True); input()"


@pytest.fixture
def owner(short_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its scratch directory."""
    monkeypatch.setattr(tempfile, "tempdir", short_directory)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": short_directory, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def cleanups_of(path: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-1:] == [str(path)]]


def test_it_is_removed_when_its_process_is_killed(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = owner
    assert path.stat().st_mode & 0o777 == 0o700
    process.kill()
    until(lambda: not path.exists())


def test_if_the_cleanup_was_killed_too_the_next_process_removes_it(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = owner
    ScratchDirectory().remove()
    assert path.exists(), "its process is alive"
    (cleanup,) = cleanups_of(path)
    cleanup.kill()
    process.kill()
    process.wait()
    assert path.exists()
    mine = ScratchDirectory()
    until(lambda: not path.exists())
    mine.remove()
    assert not Path(mine.path).exists()


def test_directories_of_others_are_left_alone(short_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vLLM integration's directories have the same prefix, and a file `owner`."""
    monkeypatch.setattr(tempfile, "tempdir", short_directory)
    other = Path(tempfile.mkdtemp(prefix="guided-vllm-"))
    (other / "owner").write_text("{}")
    mine = ScratchDirectory()
    assert not cleanups_of(other)  # one that has been started waits for seconds
    mine.remove()
    assert (other / "owner").exists()
