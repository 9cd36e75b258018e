"""Ends what a test has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_cluster import close_all


@pytest.fixture(autouse=True)
def no_actor_left() -> Iterator[None]:
    yield
    close_all()
