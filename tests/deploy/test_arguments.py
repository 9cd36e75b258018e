"""Arguments of the Ray Serve application: GPUs are reserved and used, or refused; keys
are not among them."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.arguments import placement_group, read_arguments


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({}, "auto"),
        ({"num_gpus": 1}, "cuda"),
        ({"num_gpus": "0.5", "device": "cuda:0"}, "cuda:0"),
    ],
)
def test_a_replica_with_gpus_does_not_fall_back_to_the_cpu(
    given: dict[str, Any], device: str
) -> None:
    assert read_arguments(given)[1].load.device == device


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"num_gpus": 1, "device": "cpu"},
            "num_gpus reserves GPUs, and device is 'cpu'",
        ),
        ({"device": "cuda"}, "a replica sees only the GPUs that it reserves"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_arguments(given)


@pytest.mark.parametrize(
    ("given", "bundles", "others"),
    [
        (
            {"num_actors": 2},
            [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}],
            {"strategy": "STRICT_PACK"},
        ),
        (
            {
                "num_gpus": 1,
                "num_actors": 1,
                "placement": "guided_mask:2",
                "actor_cpus": 0,
            },
            [{"CPU": 1, "GPU": 1}, {"guided_mask": 2}],
            {"strategy": "PACK"},
        ),
        (
            {"num_actors": 1, "placement": "pool=masks"},
            [{"CPU": 1}, {"CPU": 1}],
            {"strategy": "PACK", "bundle_label_selector": [{}, {"pool": "masks"}]},
        ),
    ],
)
def test_a_replica_reserves_what_its_pool_takes(
    given: dict[str, Any], bundles: list[dict[str, float]], others: dict[str, Any]
) -> None:
    settings = placement_group(*read_arguments(given))
    assert settings == {
        f"placement_group_{name}": value
        for name, value in {"bundles": bundles, **others}.items()
    }
