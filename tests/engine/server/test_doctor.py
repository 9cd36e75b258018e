"""`guided doctor`: what it finds, and what it says to do."""

from __future__ import annotations

import resource

import pytest

from engine.config import LoadOptions
from engine.server.commands import doctor
from engine.server.commands.doctor import Finding, examine
from engine.server.options import ServeOptions
from guided.pools.options import RayPoolOptions


@pytest.fixture(autouse=True)
def one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"llguidance": None})


def found(options: ServeOptions) -> dict[str, Finding]:
    return {finding.subject.partition(" ")[0]: finding for finding in examine(options)}


def test_this_machine_is_fine() -> None:
    findings = found(ServeOptions(port=0, load=LoadOptions(device="cpu")))
    assert {"system", "shared", "Ray", "backend"} <= findings.keys()
    assert not [finding for finding in findings.values() if finding.level == "error"]
    assert findings["backend"].subject.startswith("backend llguidance 1.")


@pytest.mark.parametrize(
    ("ray", "says"),
    [
        (RayPoolOptions(address="127.0.0.1:1"), "Connection refused"),
        (RayPoolOptions(address="head"), "name the cluster by its own address, HOST:6379"),
        (RayPoolOptions(placement="guided_mask"), "placement guided_mask needs a cluster"),
    ],
)
def test_a_cluster_that_cannot_be_joined(ray: RayPoolOptions, says: str) -> None:
    findings = examine(ServeOptions(port=0, ray=ray, load=LoadOptions(device="cpu")))
    (error,) = [finding for finding in findings if finding.level == "error"]
    assert error.subject == "Ray"
    assert says in error.text


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2048))
    limits = [
        finding
        for finding in examine(ServeOptions(port=0, load=LoadOptions(device="cpu")))
        if "limit" in finding.subject
    ]
    assert [finding.level for finding in limits] == ["warning"]
    assert "set ulimit -n 4096, as root" in limits[0].text


def test_a_gpu_that_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (error,) = [
        finding
        for finding in examine(ServeOptions(port=0, load=LoadOptions(device="cuda")))
        if finding.level == "error"
    ]
    assert error.subject == "GPU"
    assert "no CUDA device" in error.text


def test_a_backend_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"nonesuch": None})
    findings = examine(ServeOptions(port=0, load=LoadOptions(device="cpu")))
    (error,) = [finding for finding in findings if finding.level == "error"]
    assert error.subject == "backend nonesuch"
    assert "reinstall" in error.text
