"""A directory for channels, for tests that need no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_actor import close_all


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("s")
    yield str(directory)
    close_all()
    assert not list(Path(directory).iterdir()), "a socket's file was left behind"
