"""Actors that end, with `max_replays`: which requests fail, and that all others have
the same output as without faults."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from driven_pool import gone, placement
from engine_runs import bystanders, errors, generate, said
from faulty_backend import ADAPTER, NAME
from model_families import FAMILIES
from serving import wait_until
from transformers import PreTrainedTokenizerFast

from actors import RayPool
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel, prepare_model
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.backends import BACKENDS
from guided.errors import GrammarLoadTimeout, PoolUnavailable, WorkerDied
from guided.pools.inline import InlinePool

LONG = 120.0
Outputs = dict[str, RequestOutput]


def poisoned(fault: str) -> SamplingParams:
    return SamplingParams(
        regex=f"{fault} length=20", backend=NAME, seed=9, max_tokens=40
    )


@pytest.fixture(scope="module")
def pool(tiny_model: LoadedModel, local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(
        tiny_model.vocabulary,
        num_actors=2,
        mask_limit=2.0,
        max_replays=1,
        pool_wait=LONG,
    ).started()
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def expected(tiny_model: LoadedModel) -> Outputs:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(BACKENDS, NAME, ADAPTER)
        return generate(tiny_model, InlinePool(tiny_model.vocabulary), bystanders())


@pytest.fixture(autouse=True)
def all_up(pool: RayPool, faulty_here: None) -> Iterator[None]:
    """Each test starts with all actors up, and with no actor that another test has
    killed."""
    wait_until(
        lambda: all(worker.state == "up" for worker in pool.status().workers), LONG
    )
    yield
    assert not any(placement(pool).values()), "every sequence was freed"


def in_the_middle(action: Callable[[LLMEngine], None]) -> Callable[[LLMEngine], None]:
    """Do something once between two steps, when each unfinished request has some
    output."""
    done: list[bool] = []

    def between(engine: LLMEngine) -> None:
        sequences = [
            sequence for group in engine.groups.values() for sequence in group.sequences
        ]
        if not done and all(sequence.num_output_tokens >= 3 for sequence in sequences):
            done.append(True)
            action(engine)

    return between


def kill_actors(pool: RayPool) -> None:
    for pid in placement(pool):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        gone(pid)


def test_two_poisoned_grammars_end_two_requests(
    pool: RayPool, tiny_model: LoadedModel, expected: Outputs
) -> None:
    """Together they end three or four actors, and all other sequences there are
    replayed each time. A slow one may be marked at each of these deaths, and end
    too."""
    poison = {
        "segfault": poisoned("segfault@fill:3"),
        "exit": poisoned("exit@accept:8"),
    }
    found = generate(tiny_model, pool, bystanders() | poison)
    assert errors(found) | {"late": WorkerDied.code} == dict.fromkeys(
        (*poison, "late"), WorkerDied.code
    )
    assert said(found, *poison, "late") == {
        name: text for name, text in said(expected).items() if name != "late"
    }
    assert [len(found[name].outputs[0].token_ids) for name in poison] == [3, 9]


def test_all_actors_killed_between_two_steps(
    pool: RayPool, tiny_model: LoadedModel, expected: Outputs
) -> None:
    """No actor is up for a while. Constrained sequences wait and continue at their
    positions."""
    running: set[str] = set()

    def kill_all(engine: LLMEngine) -> None:
        kill_actors(pool)
        running.update(engine.groups)

    found = generate(tiny_model, pool, bystanders(), in_the_middle(kill_all))
    assert running - {"free"}, "during generation"
    assert not errors(found)
    assert said(found) == said(expected)


def test_recurrent_states_stay_during_a_replay(
    pool: RayPool, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    family = next(family for family in FAMILIES if family.title == "Qwen 3.5")
    model = prepare_model(family.make(), tiny_tokenizer)
    assert model.vocabulary == pool.vocabulary
    expected = generate(model, InlinePool(model.vocabulary), bystanders())
    found = generate(
        model, pool, bystanders(), in_the_middle(lambda engine: kill_actors(pool))
    )
    assert not errors(found)
    assert said(found) == said(expected)


@pytest.mark.parametrize("fault", ["exit@load", "hold@load"])
def test_a_grammar_that_cant_be_loaded_ends_its_own_request(
    pool: RayPool, tiny_model: LoadedModel, expected: Outputs, fault: str
) -> None:
    """It ends two actors, or one if the supervisor ends it, which is not counted for
    others."""
    bad = poisoned(fault)
    found = generate(tiny_model, pool, bystanders() | {"bad": bad})
    assert errors(found) == {
        "bad": WorkerDied.code if fault == "exit@load" else GrammarLoadTimeout.code
    }
    assert said(found, "bad") == said(expected)


def test_where_no_actor_comes_up_constrained_requests_end_and_the_others_go_on(
    tiny_model: LoadedModel, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: set[str] = set()
    pool = RayPool(
        tiny_model.vocabulary, num_actors=2, max_replays=1, pool_wait=3.0
    ).started()
    # the next ones are refused
    monkeypatch.setattr("actors.ray_pool.version", lambda _: "another")

    def kill_all(engine: LLMEngine) -> None:
        kill_actors(pool)
        wait_until(lambda: not pool.status().healthy, LONG)
        engine.add_request("new", "Quick", SamplingParams(regex="[0-9]{5}"))
        waiting.update(name for name in engine.groups if name != "free")

    try:
        found = generate(tiny_model, pool, bystanders(), in_the_middle(kill_all))
    finally:
        pool.shutdown()
    assert errors(found) == dict.fromkeys(waiting, PoolUnavailable.code)
    assert "new" in waiting
    assert said(found, *waiting) == {
        name: text for name, text in said(expected).items() if name not in waiting
    }
