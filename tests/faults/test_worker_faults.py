"""A fault of a grammar library within one row of an actor ends its request and changes
no other output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_runs import bystanders, errors, generate, said
from faulty_backend import NAME

from actors import RayPool
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.errors import BackendError, DeadEnd, TokenRejected
from guided.pools.inline import InlinePool

pytestmark = pytest.mark.usefixtures("faulty_here")
FAULTS = {
    "raise@accept:2": BackendError,
    "raise@fill:3": BackendError,
    "panic@accept:1": BackendError,
    "panic@fill:2": BackendError,
    "empty@fill:3": DeadEnd,
    "reject@accept:4": TokenRejected,
}


@pytest.fixture(scope="module")
def pool(tiny_model: LoadedModel, local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(tiny_model.vocabulary, num_actors=2).started()
    yield pool
    pool.shutdown()


def test_every_fault_ends_its_own_request_and_no_other(
    pool: RayPool, tiny_model: LoadedModel
) -> None:
    expected = generate(tiny_model, InlinePool(tiny_model.vocabulary), bystanders())
    assert not errors(expected)
    faults = {
        fault: SamplingParams(
            regex=f"{fault} name={fault}", backend=NAME, seed=7, max_tokens=30
        )
        for fault in FAULTS
    }
    found = generate(tiny_model, pool, bystanders() | faults)
    assert said(found, *faults) == said(expected)
    assert errors(found) == {fault: error.code for fault, error in FAULTS.items()}
    assert all(
        one.finish_reason == "error" for fault in faults for one in found[fault].outputs
    )
    lengths = {fault: len(found[fault].outputs[0].token_ids) for fault in faults}
    assert lengths == {
        fault: int(fault[-1]) + ("accept" in fault) for fault in lengths
    }, "at its position, not before"
    assert {worker.restarts for worker in pool.status().workers} == {0}
