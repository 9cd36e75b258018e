"""A cluster of two actors on threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()
