"""Fixtures: a tiny model, and the faulty backend in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_backend import ADAPTER, NAME

from engine.model_loader import LoadedModel, load_model
from guided.backends import BACKENDS


@pytest.fixture(scope="session")
def tiny_model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="float32", device="cpu")


@pytest.fixture
def faulty_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the backend "faulty" available to requests."""
    monkeypatch.setitem(BACKENDS, NAME, ADAPTER)
