"""A cluster of two actors on threads, and the end of what a test has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_cluster import Cluster, close_all


@pytest.fixture(autouse=True)
def no_actor_left() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()
