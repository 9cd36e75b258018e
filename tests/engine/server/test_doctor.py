"""`guided doctor`: what it finds, and what it says to do."""

from __future__ import annotations

import pytest

from engine.config import LoadOptions
from engine.server.commands import doctor
from engine.server.commands.doctor import Finding, examine
from engine.server.options import ServeOptions
from guided.pools.options import RayPoolOptions

CPU = LoadOptions(device="cpu")


def errors(options: ServeOptions) -> list[Finding]:
    return [finding for finding in examine(options) if finding.level == "error"]


def test_a_machine_that_is_fine_but_for_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"llguidance": None, "nonesuch": None})
    findings = {finding.subject.rstrip("0123456789."): finding for finding in examine(ServeOptions(load=CPU))}
    assert {"system", "Ray"} <= findings.keys()
    assert (findings["backend llguidance "].level, findings["backend llguidance "].text) == ("ok", "compiles")
    (error,) = [finding for finding in findings.values() if finding.level == "error"]
    assert error.subject == "backend nonesuch"
    assert "reinstall" in error.text


@pytest.mark.parametrize(
    ("options", "subject", "says"),
    [
        (ServeOptions(ray=RayPoolOptions(address="127.0.0.1:1"), load=CPU), "Ray", "Connection refused"),
        (ServeOptions(ray=RayPoolOptions(placement="guided_mask"), load=CPU), "Ray", "needs a cluster"),
        (ServeOptions(load=LoadOptions(device="cuda")), "GPU", "no CUDA device"),
    ],
)
def test_what_is_missing_is_named(
    options: ServeOptions, subject: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "BACKENDS", {})
    (error,) = errors(options)
    assert error.subject == subject
    assert says in error.text
