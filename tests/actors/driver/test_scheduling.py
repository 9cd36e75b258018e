"""Where Ray starts an actor: what is passed to Ray for each placement, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from actors.driver.scheduling import Scheduling, check_room
from guided.pools.options import NodePlacement

NODES: list[dict[str, Any]] = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4, "memory": 1}, "Labels": {"ray.io/node-id": "a"}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 2, "guided_mask": 4}, "Labels": {"pool": "masks"}},
    {"NodeID": "c", "Alive": True, "Resources": {"guided_mask": 1}, "Labels": {"pool": "masks"}},
    {"NodeID": "d", "Alive": False, "Resources": {"CPU": 64, "guided_mask": 64}, "Labels": {"pool": "old"}},
]


@pytest.mark.parametrize(
    ("placement", "cpus", "chosen"),
    [
        ("local", 0, ("a", {"num_cpus": 0})),
        ("local", 2, ("a", {"num_cpus": 2})),
        ("spread", 0, ("b", {"num_cpus": 0})),
        ("spread", 1, (None, {"num_cpus": 1})),
        ("guided_mask", 1, (None, {"num_cpus": 1, "resources": {"guided_mask": 1}})),
        ("guided_mask:3", 0, (None, {"num_cpus": 0, "resources": {"guided_mask": 3}})),
        ("pool=masks", 1, (None, {"num_cpus": 1, "label_selector": {"pool": "masks"}})),
        ("pool=masks", 0, ("c", {"num_cpus": 0})),
    ],
)
def test_the_second_actor_of_a_pool_on_node_a(placement: str, cpus: float, chosen: tuple[str, dict[str, Any]]) -> None:
    assert Scheduling(NodePlacement.parse(placement), cpus, index=1).choose(NODES, "a") == chosen


def test_actors_without_cpus_are_placed_on_the_nodes_in_turn() -> None:
    spread = NodePlacement.parse("spread")
    assert [Scheduling(spread, 0, index).choose(NODES, "a")[0] for index in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("placement", "cpus", "says"),
    [
        ("guided_mask:5", 0, "no node of the Ray cluster has the resource of placement 'guided_mask:5'"),
        ("gpu_mask", 0, "its 3 nodes have guided_mask:1, guided_mask:4, pool=masks"),
        ("pool=old", 1, "no node of the Ray cluster has the label of placement 'pool=old'"),
        ("local", 5, "an actor needs 5 CPUs on one node, and of the nodes of placement 'local' none has more than 4"),
        ("pool=masks", 3, "none has more than 2: lower actor_cpus"),
    ],
)
def test_an_impossible_placement_is_refused_with_what_there_is(placement: str, cpus: float, says: str) -> None:
    with pytest.raises(ValueError, match="node") as raised:
        Scheduling(NodePlacement.parse(placement), cpus).choose(NODES, "a")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("placement", "cpus", "says"),
    [
        ("local", 1, None),
        (
            "local",
            1.5,
            "1.5 CPUs for each of 3 mask actors, and the nodes of placement 'local' have 4: lower num_actors",
        ),
        ("spread", 1, None),
        ("spread", 3, "of placement 'spread' have 4: lower num_actors or actor_cpus"),
        ("guided_mask", 0, None),
        ("guided_mask:2", 0, "3 mask actors take 2 of guided_mask each, and the nodes have 4: lower num_actors"),
        ("guided_mask", 3, "an actor needs 3 CPUs on one node"),
        ("group:" + 36 * "0", 8, None),
    ],
)
def test_a_cluster_without_room_for_three_actors(placement: str, cpus: float, says: str | None) -> None:
    actor = Scheduling(NodePlacement.parse(placement), cpus)
    if says is None:
        check_room(actor, 3, NODES, "a")
        return
    with pytest.raises(ValueError, match="lower") as raised:
        check_room(actor, 3, NODES, "a")
    assert says in str(raised.value)
