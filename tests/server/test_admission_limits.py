"""Limits of one request (400 beyond)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_pool import FaultyPool
from httpx import Response
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.model_loader import load_model
from engine.sampling_params import SamplingParams
from engine.server.app import create_app
from engine.server.options import ServerSettings
from guided.errors import ConstraintTooLarge, InvalidRequest
from guided.limits import Limits

LIMITS = Limits(max_nesting=3, max_alternatives=2, max_enum=3, max_choices=3, max_repetition=5, max_grammar_rules=2)


@pytest.fixture(scope="module")
def pool_and_engine(tiny_llama_dir: Path) -> Iterator[tuple[FaultyPool, AsyncLLM]]:
    model = load_model(str(tiny_llama_dir), dtype="float32")
    pool = FaultyPool(model.vocabulary)
    engine = AsyncLLM(model, pool, EngineConfig(max_num_seqs=8, max_n=2, limits=LIMITS))
    yield pool, engine
    engine.shutdown()


@pytest.fixture
def client(pool_and_engine: tuple[FaultyPool, AsyncLLM]) -> Iterator[TestClient]:
    app = create_app(pool_and_engine[1], ServerSettings(model_names=("tiny",)))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, **fields: Any) -> Response:
    return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"n": 3}, "invalid_request", "n is 3; the limit is 2"),
        ({"regex": "a{6}"}, "constraint_too_large", "limit of 5"),
        ({"regex": "a|b|c"}, "constraint_too_large", "more than 2 alternatives"),
        ({"guided_choice": ["a", "b", "c", "d"]}, "constraint_too_large", "4 entries; the limit is 3"),
        ({"grammar": 'start: a b\na: "a"\nb: "b"'}, "constraint_too_large", "3 rules; the limit is 2"),
        ({"json_schema": {"enum": [1, 2, 3, 4]}}, "constraint_too_large", "4 values; the limit is 3"),
        ({"json_schema": {"properties": {"a": {"items": {}}}}}, "constraint_too_large", "deeper than 3 levels"),
        ({"json_object": True, "whitespace_pattern": " {6}"}, "constraint_too_large", "limit of 5"),
        ({"structured_outputs": {"regex": "a{6}"}}, "constraint_too_large", "limit of 5"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_one_request_may_be(client: TestClient, asked: dict[str, Any], code: str, says: str) -> None:
    answer = post(client, **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert says in error["message"]
    assert error["param"]
    assert answer.headers["x-should-retry"] == "false"


def test_callers_from_python_are_held_to_the_engines_limits_too(pool_and_engine: tuple[FaultyPool, AsyncLLM]) -> None:
    engine = pool_and_engine[1].engine
    for _ in range(2):
        with pytest.raises(ConstraintTooLarge, match="limit of 5"):
            engine.admit("one", "a", SamplingParams(regex="a{6}", max_tokens=1))
    engine.admit("two", "a", SamplingParams(regex="a{5}", max_tokens=1))
    with pytest.raises(InvalidRequest, match="n is 3"):
        engine.admit("three", "a", SamplingParams(n=3, max_tokens=1))
