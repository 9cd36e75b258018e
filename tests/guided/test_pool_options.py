"""RayPoolOptions: placements are checked where they are given."""

from __future__ import annotations

from typing import Any

import pytest

from guided.pools.options import NodePlacement, RayPoolOptions


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        (
            "guided_mask",
            NodePlacement("guided_mask", "resource", "guided_mask", amount=1),
        ),
        (
            "guided_mask:0.5",
            NodePlacement("guided_mask:0.5", "resource", "guided_mask", amount=0.5),
        ),
        (
            "ray.io/group=masks",
            NodePlacement("ray.io/group=masks", "label", "ray.io/group", "masks"),
        ),
    ],
)
def test_a_placement_names_a_resource_or_a_label(
    text: str, placement: NodePlacement
) -> None:
    assert NodePlacement.parse(text) == placement


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"placement": text}, "placement is")
        for text in ("", ":1", "guided_mask:0", "guided_mask:nan", "a:b", "=b", "a=")
    ]
    + [({"actor_cpus": -1}, "actor_cpus is -1")],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayPoolOptions(**given)
