"""The faulty backend in this process."""

from __future__ import annotations

import pytest
from faulty_backend import ADAPTER, NAME

from guided.backends import BACKENDS


@pytest.fixture
def faulty_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the backend "faulty" available to requests."""
    monkeypatch.setitem(BACKENDS, NAME, ADAPTER)
