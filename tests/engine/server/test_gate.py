"""Hosts, API keys and clients, in an application without a socket."""

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
from engine.server.errors import QueueFull
from engine.server.options import ServerSettings
from guided.errors import InvalidRequest

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(tiny_llama_dir), "inline", EngineConfig(max_num_seqs=4), dtype="float32")
    yield engine
    engine.shutdown()


def client_of(engine: AsyncLLM, address: str = "192.0.2.1", **settings: Any) -> TestClient:
    app = create_app(engine, ServerSettings(model_names=("tiny",), **settings))
    return TestClient(app, raise_server_exceptions=False, client=(address, 50000))


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


class TestShares:
    """A client is an address; with several keys, a key."""

    def refused(self, client: TestClient, **headers: str) -> bool:
        answer = client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code in (200, 429), answer.text
        return answer.status_code == 429

    @pytest.mark.parametrize(
        ("flooding", "same", "other"),
        [
            ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
            ("192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"),
            ("2001:db8:0:1::/64", "2001:db8:0:1::5", "2001:db8:0:2::5"),
        ],
    )
    def test_an_address_that_fills_the_server_does_not_lock_others_out(
        self, engine: AsyncLLM, flooding: str, same: str, other: str
    ) -> None:
        client = client_of(engine, same, max_requests=4)
        context: ServerContext = client.app.state.context  # type: ignore[attr-defined]
        newcomer = TestClient(client.app, client=(other, 1))
        with context.admit(4, flooding):
            assert self.refused(client)
            assert not self.refused(newcomer)
        assert not self.refused(client)
        assert context.in_flight == 0

    def test_with_several_keys_each_has_a_share_from_any_address(self, engine: AsyncLLM) -> None:
        client = client_of(engine, api_key="one,two", max_requests=2)
        with client.app.state.context.admit(2, "key 0"):  # type: ignore[attr-defined]
            assert self.refused(client, authorization="Bearer one")
            assert not self.refused(client, authorization="Bearer two")

    def test_shares_end_at_twice_the_limit(self, engine: AsyncLLM) -> None:
        context: ServerContext = client_of(engine, max_requests=4).app.state.context  # type: ignore[attr-defined]
        with context.admit(4, "a"), context.admit(2, "b"):
            with pytest.raises(QueueFull), context.admit(2, "c"):  # its share is 4 / 3
                pass
            with context.admit(1, "c"), context.admit(1, "d"), pytest.raises(QueueFull), context.admit(1, "e"):
                pass

    def test_n_and_prompts_are_multiplied(self, engine: AsyncLLM) -> None:
        client = client_of(engine, max_requests=5)
        context: ServerContext = client.app.state.context  # type: ignore[attr-defined]
        assert client.post("/v1/completions", json={**BODY, "n": 2, "prompt": ["a", "b"]}).status_code == 200
        answer = client.post("/v1/completions", json={**BODY, "n": 2, "prompt": ["a", "b", "c"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        with pytest.raises(InvalidRequest), context.admit(6, "a"):
            pass
        with context.admit(2, "192.0.2.1"):
            assert client.post("/v1/completions", json={**BODY, "n": 4}).status_code == 429
            assert client.post("/v1/completions", json={**BODY, "n": 3}).status_code == 200

    def test_log_probabilities_of_several_choices_are_bounded(self, engine: AsyncLLM) -> None:
        client = client_of(engine, max_answer_logprobs=100)
        for n, max_tokens, status in ((1, 60, 200), (2, 8, 200), (2, 9, 400)):
            body = {**BODY, "n": n, "max_tokens": max_tokens, "logprobs": 5}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "logprobs"

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


def test_a_client_with_many_requests_waits_while_another_one_is_active(engine: AsyncLLM) -> None:
    app = create_app(engine, ServerSettings(model_names=("tiny",)))
    context: ServerContext = app.state.context
    flood, other = (TestClient(app, client=(f"192.0.2.{index}", 50000)) for index in (1, 2))
    assert other.get("/nothing").status_code == 404
    assert flood.post("/v1/completions", json=BODY).status_code == 200
    for _ in range(3 * engine.engine.scheduler.share(2)):
        assert context.turns.enter("192.0.2.1"), "only a POST makes a client active"
    for _ in range(3 * engine.engine.scheduler.share(2)):
        context.turns.leave("192.0.2.1", 0.0)
    assert other.post("/v1/completions", json=BODY).status_code == 200
    inside = 0
    while context.turns.enter("192.0.2.1"):
        inside += 1
    assert inside == 2 * engine.engine.scheduler.share(2)
    assert flood.get("/health").status_code == 200, "probes take no turns"
    assert other.post("/v1/completions", json=BODY).status_code == 200
    context.turns.leave("192.0.2.1", 0.0)
    assert flood.post("/v1/completions", json=BODY).status_code == 200
