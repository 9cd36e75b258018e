"""`guided doctor`: what it finds, and what it says to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.config import LoadOptions
from engine.server.commands import doctor
from engine.server.commands.doctor import Finding, examine
from engine.server.options import ServeOptions

CPU = LoadOptions(device="cpu")


def test_a_machine_that_is_fine_but_for_one_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"llguidance": None, "nonesuch": None})
    findings = {
        finding.subject: finding for finding in examine(ServeOptions(load=CPU, port=0))
    }
    assert "system" in findings
    assert findings["Ray"].level == "ok"
    assert (
        findings["backend llguidance"].level,
        findings["backend llguidance"].text,
    ) == ("ok", "compiles")
    (error,) = [finding for finding in findings.values() if finding.level == "error"]
    assert error.subject == "backend nonesuch"
    assert "reinstall" in error.text


def test_a_missing_device_and_ray_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "BACKENDS", {})
    ray, gpu = (
        finding
        for finding in examine(
            ServeOptions(load=LoadOptions(device="cuda"), pool="ray", port=0)
        )
        if finding.level == "error"
    )
    assert (ray.subject, gpu.subject) == ("Ray", "GPU")
    assert "pip install '.[server,ray]' in a checkout" in ray.text
    assert "no CUDA device" in gpu.text


def test_a_port_in_use_and_a_model_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeOptions(
            model=str(tmp_path / "nothing.gguf"), load=CPU, pool="inline", port=port
        )
        errors = {
            finding.subject: finding.text
            for finding in examine(options)
            if finding.level == "error"
        }
    assert errors.keys() == {"port", "model"}
    assert f"port {port}: Address already in use" in errors["port"]
    assert "nothing.gguf" in errors["model"]


def test_without_ray_masks_are_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    findings = {
        finding.subject: finding for finding in examine(ServeOptions(load=CPU, port=0))
    }
    assert findings["Ray"].level == "warning"
    assert "in the server's process" in findings["Ray"].text


def test_a_model_that_cannot_be_served_is_named_with_what_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {})
    (tmp_path / "config.json").write_text(
        '{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}'
    )
    options = ServeOptions(model=str(tmp_path), load=CPU, pool="inline", port=0)
    [error] = [finding for finding in examine(options) if finding.level == "error"]
    reason = "its code does not support other attention backends"
    assert (
        error.text
        == f"BloomForCausalLM can't be served: {reason}. vLLM may serve it, with guided inside: docs/vllm.md"
    )


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpu_and_its_fused_kernels(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    def tried(subject: str, good: str, advice: str, *others: str) -> Finding:
        if subject != "GPU" or has_gpu:
            return Finding("ok", subject, good or "runs")
        return Finding(
            "error",
            subject,
            f"no CUDA device: this torch is a build for CPUs: {advice}",
        )

    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr(doctor, "_tried", tried)
    monkeypatch.setattr(
        doctor, "find_spec", lambda name: None if name == "liger_kernel" else object()
    )
    findings = {
        finding.subject: finding
        for finding in examine(ServeOptions(pool="inline", port=0))
    }
    assert ("fused kernels" in findings) == has_gpu
    text = (
        "runs"
        if has_gpu
        else "no CUDA device: this torch is a build for CPUs; the CPU is used"
    )
    assert findings["GPU"] == Finding("ok", "GPU", text)
