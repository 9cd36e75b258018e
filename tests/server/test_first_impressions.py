"""What a new user meets: hints, reasons in the log, schemas in the prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}

Make = Callable[..., TestClient]


def message(client: TestClient, path: str, **options: Any) -> str:
    answer = client.request("POST" if options else "GET", path, **options)
    assert answer.status_code == 404
    return str(answer.json()["error"]["message"])


def test_a_path_without_v1_gets_a_hint(client: TestClient) -> None:
    assert "/v1/chat/completions" in message(client, "/chat/completions", json=HELLO)
    assert "/v1/models" in message(client, "/models")
    assert "/docs" in message(client, "/nosuch")


class TestLog:
    @pytest.fixture(autouse=True)
    def propagating(self) -> Iterator[None]:
        logger = logging.getLogger("guided.server")
        level = logger.level
        logger.setLevel("INFO")
        yield
        logger.setLevel(level)

    @pytest.mark.parametrize(
        ("path", "body", "says"),
        [
            ("/v1/chat/completions", {**HELLO, "regex": "("}, "invalid_constraint: regex: "),
            ("/v1/chat/completions", {**HELLO, "model": "a\nERROR faked"}, "model_not_found: "),
            ("/chat/completions", HELLO, "not_found: "),
        ],
    )
    def test_the_reason_of_a_refusal(
        self, client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: Any, says: str
    ) -> None:
        client.post(path, json=body, headers={"x-request-id": "mine"})
        [record] = [each for each in caplog.records if "refused" in each.message]
        assert says in record.message
        assert path in record.message
        assert "mine" in record.message
        assert "\n" not in record.message


class TestDescribedSchema:
    def count(self, client: TestClient, **fields: Any) -> int:
        answer = client.post("/v1/check", json={**HELLO, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["prompt_tokens"])

    def tokens(self, client: TestClient, *messages: dict[str, str]) -> int:
        return int(client.post("/tokenize", json={"messages": [*messages]}).json()["count"])

    def test_the_request_asks_for_it(self, client: TestClient) -> None:
        plain = self.count(client, json_schema=SCHEMA)
        assert plain == self.tokens(client, *HELLO["messages"])
        text = f"Answer with JSON only. It satisfies this JSON schema:\n{json.dumps(SCHEMA, separators=(',', ':'))}"
        system = {"role": "system", "content": text}
        described = self.count(client, json_schema=SCHEMA, describe_schema=True)
        assert described == self.tokens(client, system, *HELLO["messages"])

    def test_a_system_message_is_kept(self, client: TestClient) -> None:
        messages = [{"role": "system", "content": "Be kind."}, *HELLO["messages"]]
        described = self.count(client, messages=messages, json_schema=SCHEMA, describe_schema=True)
        schema = json.dumps(SCHEMA, separators=(",", ":"))
        text = f"Be kind.\n\nAnswer with JSON only. It satisfies this JSON schema:\n{schema}"
        assert described == self.tokens(client, {"role": "system", "content": text}, *HELLO["messages"])

    def test_the_server_asks_for_it(self, client_with: Make) -> None:
        asking, plain = client_with(describe_schema=True), client_with()
        assert self.count(asking, json_schema=SCHEMA) == self.count(plain, json_schema=SCHEMA, describe_schema=True)
        assert self.count(asking, json_schema=SCHEMA, describe_schema=False) == self.count(plain, json_schema=SCHEMA)
        assert self.count(asking, regex="a") == self.count(plain, regex="a")

    def test_without_a_schema(self, client: TestClient) -> None:
        answer = client.post("/v1/chat/completions", json={**HELLO, "regex": "a", "describe_schema": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "describe_schema"
