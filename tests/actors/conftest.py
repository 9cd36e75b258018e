"""Channels for tests that need no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_actor import close_all

from actors.channel import Transport


@pytest.fixture
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    directory = tmp_path_factory.mktemp("s")
    transport = Transport(str(directory), "127.0.0.1")
    yield transport
    close_all()
    transport.close()
    assert not list(Path(directory).iterdir()), "a socket's file was left behind"
