"""Errors about bodies of the wrong shape: the field and the reason."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


def said(client: TestClient, path: str, body: dict[str, Any] | str) -> tuple[str, str | None]:
    """Message and param of a 400."""
    if isinstance(body, str):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
    else:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert answer.headers["x-should-retry"] == "false"
    return error["message"], error["param"]


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_takes_one_of_two(client: TestClient, body: dict[str, Any]) -> None:
    assert said(client, "/tokenize", body) == ("give either prompt or messages", None)


@pytest.mark.parametrize("given", [r"\ud800", "x" * 1_000], ids=["surrogate", "long"])
def test_types_that_are_no_unicode_or_long(client: TestClient, given: str) -> None:
    part = f'{{"type": "{given}", "text": "a"}}'
    bodies = [
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": [{part}]}}]}}'),
        ("/v1/responses", f'{{"input": [{part}]}}'),
        ("/v1/responses", f'{{"input": [{{"role": "user", "content": [{part}]}}]}}'),
        ("/v1/responses", f'{{"input": "a", "tools": [{part}]}}'),
    ]
    for path, body in bodies:
        message, _ = said(client, path, body)
        assert "are not supported" in message
        assert len(message) < 300


def test_stop_strings_are_unicode(client: TestClient) -> None:
    for stop in (r'"\ud800"', r'["a", "\ud800"]'):
        message, param = said(client, "/v1/completions", f'{{"prompt": "x", "stop": {stop}}}')
        assert param == "stop"
        assert message.startswith("stop is not valid Unicode")


@pytest.mark.parametrize("fields", [{}, {"stream": False}])
def test_stream_options_are_of_streams(client: TestClient, fields: dict[str, Any]) -> None:
    body = {**PROMPT, **fields, "stream_options": {"include_usage": True}}
    assert said(client, "/v1/completions", body) == ("stream_options requires stream: true", "stream_options")
    assert client.post("/v1/completions", json={**PROMPT, **fields, "stream_options": None}).status_code == 200


def test_a_schemas_root_has_an_empty_pointer(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={**PROMPT, "json_schema": False}).json()["error"]
    assert answer["pointer"] == ""
    assert answer["message"].endswith("(at the root)")


def test_a_pointer_stays_one_however_deep(client: TestClient) -> None:
    schema: dict[str, Any] = {"type": "nonesuch"}
    for name in range(20):
        schema = {"type": "object", "properties": {f"a-property-with-a-name-{name}": schema}}
    pointer = client.post("/v1/completions", json={**PROMPT, "json_schema": schema}).json()["error"]["pointer"]
    assert 200 < len(pointer) <= 300
    here: Any = schema
    for token in pointer.split("/")[1:]:
        here = here[token]
