"""Custom logits processors over HTTP: malformed `vllm_xargs`, and the answer when a processor raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.server.app import create_app
from engine.server.options import ServerSettings

PROCESSORS = ["sample_processors:Poisonable"]


@pytest.fixture(scope="module")
def with_processors(tiny_llama_dir: Path) -> Iterator[TestClient]:
    engine = AsyncLLM(
        str(tiny_llama_dir), "inline", EngineConfig(max_num_seqs=8), dtype="float32", logits_processors=PROCESSORS
    )
    with TestClient(create_app(engine, ServerSettings(model_name="tiny")), raise_server_exceptions=False) as client:
        yield client
    engine.shutdown()


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, **fields})


def test_one_that_raises_is_a_500_of_that_request_alone(with_processors: TestClient) -> None:
    answer = complete(with_processors, vllm_xargs={"poison": "apply"})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "logits_processor_failed"
    assert "Poisonable" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert complete(with_processors).status_code == 200
    assert with_processors.get("/health").status_code == 200
    assert 'guided_engine_failures_total{code="logits_processor_failed"} 1.0' in with_processors.get("/metrics").text


@pytest.mark.parametrize("value", ["text", {"a": {"b": 1}}, {"a": [[1]]}, {"a": None}])
def test_vllm_xargs_are_strings_numbers_and_flat_lists(with_processors: TestClient, value: Any) -> None:
    assert complete(with_processors, vllm_xargs=value).status_code == 400


def test_without_a_processor_they_are_refused_and_not_ignored(client_with: Callable[..., TestClient]) -> None:
    answer = complete(client_with(), vllm_xargs={"target_token": 67})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs"
    assert "--logits-processors" in answer.json()["error"]["message"]
    assert complete(client_with(), vllm_xargs={}).status_code == 200
