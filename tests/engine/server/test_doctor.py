"""`guided doctor`: what it finds, and what it says to do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from engine.config import LoadOptions
from engine.server.commands import doctor
from engine.server.commands.doctor import examine
from engine.server.options import ServeOptions

CPU = LoadOptions(device="cpu")


def test_a_machine_that_is_fine_but_for_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"llguidance": None, "nonesuch": None})
    findings = {finding.subject.rstrip("0123456789."): finding for finding in examine(ServeOptions(load=CPU))}
    assert "system" in findings
    assert (findings["backend llguidance "].level, findings["backend llguidance "].text) == ("ok", "compiles")
    (error,) = [finding for finding in findings.values() if finding.level == "error"]
    assert error.subject == "backend nonesuch"
    assert "reinstall" in error.text


def test_a_missing_device_and_ray_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name != "ray" else missing(name))
    ray, gpu = (
        finding for finding in examine(ServeOptions(load=LoadOptions(device="cuda"))) if finding.level == "error"
    )
    assert (ray.subject, gpu.subject) == ("Ray", "GPU")
    assert "pip install" in ray.text
    assert "no CUDA device" in gpu.text


def missing(name: str) -> str:
    raise PackageNotFoundError(name)
