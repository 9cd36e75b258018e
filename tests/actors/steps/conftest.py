"""A cluster of two actors on threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_cluster import Cluster

from actors.channel import Transport


@pytest.fixture
def cluster(transport: Transport) -> Iterator[Cluster]:
    cluster = Cluster(transport)
    yield cluster
    cluster.close()
