"""A pool that the cluster has no room for is refused, with what there is."""

from __future__ import annotations

from typing import Any

import pytest

from actors.driver_process import check_room
from guided.errors import PoolUnavailable
from guided.pools.options import NodePlacement

NODES: list[dict[str, Any]] = [
    {
        "NodeID": "a",
        "Alive": True,
        "Resources": {"CPU": 4, "memory": 1},
        "Labels": {"ray.io/node-id": "a"},
    },
    {
        "NodeID": "b",
        "Alive": True,
        "Resources": {"CPU": 2, "guided_mask": 4},
        "Labels": {"pool": "masks"},
    },
    {
        "NodeID": "c",
        "Alive": True,
        "Resources": {"guided_mask": 1},
        "Labels": {"pool": "masks"},
    },
    {
        "NodeID": "d",
        "Alive": False,
        "Resources": {"CPU": 64, "guided_mask": 64},
        "Labels": {"pool": "old"},
    },
]


@pytest.mark.parametrize(
    ("placement", "cpus", "says"),
    [
        ("local", 1, None),
        (
            "local",
            1.5,
            "1.5 CPU for each of 3 mask actors, and the nodes of placement 'local' have 4 CPU",
        ),
        ("spread", 1, None),
        (
            "spread",
            3,
            "have 6 CPU, enough for 1: lower num_actors, actor_cpus or the amount in placement",
        ),
        ("pool=masks", 0.5, None),
        ("pool=masks", 1, "have 2 CPU, enough for 2"),
        (
            "pool=old",
            1,
            "no node of the Ray cluster has the label of placement 'pool=old'",
        ),
        ("guided_mask", 0, None),
        ("guided_mask:2", 0, "2 guided_mask for each of 3 mask actors"),
        ("guided_mask", 3, "3 CPU and 1 guided_mask for each of 3 mask actors"),
        (
            "guided_mask:5",
            0,
            "no node of the Ray cluster has the resource of placement 'guided_mask:5'",
        ),
    ],
)
def test_a_cluster_without_room_for_three_actors(
    placement: str, cpus: float, says: str | None
) -> None:
    where = NodePlacement.parse(placement)
    if says is None:
        check_room(where, cpus, 3, NODES, "a")
        return
    with pytest.raises(PoolUnavailable) as raised:
        check_room(where, cpus, 3, NODES, "a")
    assert says in str(raised.value)
