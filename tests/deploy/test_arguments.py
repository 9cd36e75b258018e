"""Arguments of the Ray Serve application: GPUs are reserved and used, or refused; keys are not among them."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.arguments import read_arguments


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({}, "auto"),
        ({"num_gpus": 1}, "cuda"),
        ({"num_gpus": "0.5", "device": "cuda:0"}, "cuda:0"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_a_replica_with_gpus_does_not_fall_back_to_the_cpu(given: dict[str, Any], device: str) -> None:
    assert read_arguments(given)[1].load.device == device


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_gpus": 1, "device": "cpu"}, "num_gpus reserves GPUs, and device is 'cpu'"),
        ({"device": "cuda"}, "a replica sees only the GPUs that it reserves"),
        ({"api_key": "secret"}, "api_key"),
        ({"channel_ports": "9-8"}, "channel_ports is '9-8'"),
        ({"num_actor": 3}, "num_actor"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        read_arguments(given)
    assert says in str(raised.value)
