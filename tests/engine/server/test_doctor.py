"""`guided doctor`: what it finds, and what it says to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import LoadOptions
from engine.server.commands import doctor
from engine.server.commands.doctor import examine
from engine.server.options import ServeOptions

CPU = LoadOptions(device="cpu")


def test_a_machine_that_is_fine_but_for_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"llguidance": None, "nonesuch": None})
    findings = {finding.subject: finding for finding in examine(ServeOptions(load=CPU))}
    assert "system" in findings
    assert findings["Ray"].level == "ok"
    assert (findings["backend llguidance"].level, findings["backend llguidance"].text) == ("ok", "compiles")
    (error,) = [finding for finding in findings.values() if finding.level == "error"]
    assert error.subject == "backend nonesuch"
    assert "reinstall" in error.text


def test_a_missing_device_and_ray_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "BACKENDS", {})
    ray, gpu = (
        finding for finding in examine(ServeOptions(load=LoadOptions(device="cuda"))) if finding.level == "error"
    )
    assert (ray.subject, gpu.subject) == ("Ray", "GPU")
    assert "pip install" in ray.text
    assert "no CUDA device" in gpu.text
