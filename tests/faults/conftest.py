"""A tiny model, and the backend that fails as it is told, in this process too."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
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
    """Requests may name the backend "faulty"."""
    monkeypatch.setitem(BACKENDS, NAME, ADAPTER)


@pytest.fixture
def short_directory() -> Iterator[str]:
    """For sockets: their paths are limited."""
    directory = tempfile.mkdtemp(prefix="g", dir="/tmp")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
