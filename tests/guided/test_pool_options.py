"""RayPoolOptions: placements and ports are checked where they are given."""

from __future__ import annotations

from typing import Any

import pytest

from guided.pools.options import NodePlacement, RayPoolOptions


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("guided_mask", NodePlacement("guided_mask", "resource", "guided_mask", amount=1)),
        ("guided_mask:0.5", NodePlacement("guided_mask:0.5", "resource", "guided_mask", amount=0.5)),
        ("ray.io/group=masks", NodePlacement("ray.io/group=masks", "label", "ray.io/group", "masks")),
    ],
)
def test_a_placement_names_a_resource_or_a_label(text: str, placement: NodePlacement) -> None:
    assert NodePlacement.parse(text) == placement


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"placement": text}, "placement is")
        for text in ("", ":1", "guided_mask:0", "guided_mask:nan", "a:b", "=b", "a=")
    ]
    + [({"channel_ports": text}, "must be FIRST-LAST") for text in ("7010-7000", "a-b", "", "0-5", "65000-70000", "-5")]
    + [
        ({"channel_ports": "7000-7001", "num_actors": 3}, "channel_ports has 2 ports; 3 actors need one each"),
        ({"actor_cpus": -1}, "actor_cpus is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayPoolOptions(**given)


def test_ports_include_both_ends() -> None:
    assert RayPoolOptions().ports is None
    assert RayPoolOptions(channel_ports="7000-7003").ports == range(7000, 7004)
    assert RayPoolOptions(channel_ports="7000").ports == range(7000, 7001)
