"""POST /v1/check: admission and compilation of a chat request, without its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serving import wait_until
from starlette.testclient import TestClient

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TAGS = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}}}


def test_an_accepted_request_is_described_and_counted(client: TestClient) -> None:
    body = {**HELLO, "regex": "[0-9]{4}x?", "max_tokens": 5, "colour": "red"}
    checked = client.post("/v1/check", json=body).json()
    assert checked["guided"] == {"kind": "regex", "backend": "llguidance", "not_enforced": [], "ignored": ["colour"]}
    assert checked["compile_seconds"] > 0
    assert checked["prompt_tokens"] == client.post("/v1/check", json=HELLO).json()["prompt_tokens"] > 0
    hits = 'guided_grammar_cache_hits_total{backend="llguidance",kind="regex"} '
    before = client.get("/metrics").text.partition(hits)[2].partition("\n")[0] or "0"
    assert client.post("/v1/check", json=body).json()["compile_seconds"] == 0
    after = client.get("/metrics").text.partition(hits)[2].partition("\n")[0]
    assert float(after) == float(before) + 1


def test_checked_keywords_are_named(client: TestClient) -> None:
    checked = client.post("/v1/check", json={**HELLO, "json_schema": TAGS})
    assert checked.json()["guided"]["checked"] == ["/properties/tags/uniqueItems"]
    strict = client.post("/v1/check", json={**HELLO, "json_schema": TAGS, "strict_schema": True})
    assert (strict.status_code, strict.json()["error"]["pointer"]) == (400, "/properties/tags/uniqueItems")
    answer = client.post("/v1/chat/completions", json={**HELLO, "json_schema": TAGS, "max_tokens": 3}).json()
    assert answer["guided"]["checked"] == ["/properties/tags/uniqueItems"]


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": {"properties": {"a": {"type": "int"}}}},
        {"regex": "(a"},
        {"grammar": "start: missing"},
        {"json_schema": {"type": "string", "pattern": "(?=a)"}, "backend": "xgrammar", "strict_schema": True},
        {"stream": True, "stream_options": {"include_usage": 3}},
    ],
)
def test_the_error_is_that_of_the_request(client: TestClient, fields: dict[str, Any]) -> None:
    checked = client.post("/v1/check", json={**HELLO, **fields})
    asked = client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert checked.status_code == asked.status_code == 400
    assert checked.json() == asked.json()


def test_it_generates_nothing(client_with: Callable[..., TestClient]) -> None:
    client = client_with()
    context = client.app.state.context  # type: ignore[attr-defined]
    for stream in (True, False):
        fields = {"regex": "a{500}", "stream": stream, "n": 2}
        assert client.post("/v1/check", json={**HELLO, **fields}).status_code == 200
    wait_until(lambda: context.in_flight == 0 and context.engine.health().num_running == 0)
