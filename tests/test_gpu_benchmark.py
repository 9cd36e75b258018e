"""`python -m benchmarks.gpu`, with a tiny model on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_a_tiny_model_runs_through_all_but_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--rows",
        "3",
        "5",
        "--steps",
        "4",
        "--actors",
        "--out",
    ]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, str(tmp_path)])
    gpu.main()
    document = json.loads((tmp_path / "gpu.json").read_text())
    rows = document["results"]
    assert [(row["way"], row["rows"]) for row in rows] == [
        (way, n) for way in ("unguided", "inline") for n in (3, 5)
    ]
    for row in rows:
        assert 0 < row["step_p50"] <= row["step_p99"]
        assert row["tokens_per_second"] * row["step_mean"] / 1e3 == pytest.approx(
            row["rows"], rel=0.5
        )
        assert (row["failures"], row["busy"]) == (0, None)
    assert [row["of_unguided"] for row in rows[:2]] == [1, 1]
    assert rows[0]["prepare"] == rows[0]["wait"] == 0 < rows[2]["prepare"]
    assert document["machine"]["device"] == "cpu"


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_busy_share_counts_overlaps_once() -> None:
    assert gpu.busy_share([(0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (5.0, 6.0)]) == 4 / 6
    assert gpu.busy_share([]) == 0
