"""The switch `GUIDED_VLLM` without vLLM: off, with an untested version, and with
another value."""

from __future__ import annotations

import sys

import pytest

from guided.integrations.vllm.activation import TESTED_VERSIONS, activate, check_version


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_without_the_switch_nothing_is_imported(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GUIDED_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("GUIDED_VLLM", value)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import raises
    activate()


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDED_VLLM", "perhaps")
    with pytest.raises(ValueError, match="must be 1, 0 or force"):
        activate()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.34.0rc1", "dev"])
def test_an_untested_version_is_refused_unless_forced(version: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=rf"works with vLLM {TESTED_VERSIONS[0]}, and this is vLLM {version}",
    ):
        check_version(version, forced=False)
    check_version(version, forced=True)
    check_version(f"{TESTED_VERSIONS[0]}+cpu", forced=False)
