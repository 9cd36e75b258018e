"""A cluster of two actors on threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_cluster import Cluster


@pytest.fixture
def cluster(directory: str) -> Iterator[Cluster]:
    cluster = Cluster(directory)
    yield cluster
    cluster.close()
