"""Hosts, API keys and limits, in an application without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.server.app import create_app
from engine.server.context import ServerContext
from engine.server.options import ServerSettings

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(tiny_llama_dir), "inline", EngineConfig(max_num_seqs=4), dtype="float32")
    yield engine
    engine.shutdown()


def client_of(engine: AsyncLLM, **settings: Any) -> TestClient:
    app = create_app(engine, ServerSettings(model_names=("tiny",), **settings))
    return TestClient(app, raise_server_exceptions=False)


class TestHosts:
    NAMES = ("localhost", "127.0.0.1", "[::1]")

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
    def test_allowed(self, engine: AsyncLLM, host: str) -> None:
        client = client_of(engine, allowed_hosts=self.NAMES)
        assert client.get("/version", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.", "::1"]
    )
    def test_others_are_refused_everywhere(self, engine: AsyncLLM, host: str) -> None:
        client = client_of(engine, allowed_hosts=self.NAMES)
        for path in ("/version", "/health", "/metrics", "/docs"):
            answer = client.get(path, headers={"host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "host_not_allowed")
        assert client.post("/v1/completions", json=BODY, headers={"host": host}).status_code == 400

    @pytest.mark.parametrize("names", [(), ("*",), ("a.example", "*")])
    def test_any(self, engine: AsyncLLM, names: tuple[str, ...]) -> None:
        client = client_of(engine, allowed_hosts=names)
        assert client.get("/version", headers={"host": "any.example"}).status_code == 200


class TestKeys:
    def test_each_of_several_is_accepted(self, engine: AsyncLLM) -> None:
        client = client_of(engine, api_key="one, two")
        for key, status in (("one", 200), ("two", 200), ("one, two", 401), ("", 401)):
            answer = client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status

    def test_no_key_in_the_option_is_an_error_and_not_an_open_server(self) -> None:
        with pytest.raises(ValueError, match="holds no key"):
            ServerSettings(api_key=" , ")


class TestLimits:
    def test_n_and_prompts_are_multiplied(self, engine: AsyncLLM) -> None:
        client = client_of(engine, max_requests=5)
        context: ServerContext = client.app.state.context  # type: ignore[attr-defined]
        assert client.post("/v1/completions", json={**BODY, "n": 2, "prompt": ["a", "b"]}).status_code == 200
        answer = client.post("/v1/completions", json={**BODY, "n": 2, "prompt": ["a", "b", "c"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        with context.admit(2):
            full = client.post("/v1/completions", json={**BODY, "n": 4})
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            assert (full.headers["retry-after"], full.headers["x-should-retry"]) == ("1", "true")
            assert client.post("/v1/completions", json={**BODY, "n": 3}).status_code == 200

    def test_a_large_answer_is_the_same_as_a_small_one(self, engine: AsyncLLM) -> None:
        """It is written in a thread."""
        client = client_of(engine)
        body = {**BODY, "logprobs": 1, "temperature": 0, "ignore_eos": True}
        large, small = (
            client.post("/v1/completions", json={**body, "max_tokens": tokens}).json()["choices"][0]["logprobs"]
            for tokens in (300, 20)
        )
        assert len(large["tokens"]) == 300
        assert large["tokens"][:20] == small["tokens"]
        assert large["top_logprobs"][:20] == small["top_logprobs"]
