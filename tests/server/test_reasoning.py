"""The thinking phase: where it ends, what a constraint means beside it, and how the answer shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from serving import sse
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 40}
OPEN = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}<|assistant|>"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def thinking(
    client_with: Callable[..., TestClient], tiny_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], TestClient]:
    """Make a client of a model with a template that ends in a given way."""

    def make(end: str) -> TestClient:
        tokenizer: PreTrainedTokenizerFast = tiny_engine.tokenizer
        monkeypatch.setattr(tokenizer, "chat_template", OPEN + end)
        return client_with(reasoning_format="think")

    return make


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json={**USER, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_an_answer_within_thoughts(thinking: Callable[[str], TestClient]) -> None:
    choice = ask(thinking("<think>\n"), json_schema=SCHEMA)
    assert choice["finish_reason"] == "length"  # a random model never ends its thoughts
    assert choice["message"]["content"] == ""
    assert len(choice["message"]["reasoning_content"]) > 5


ENDED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("end", "fields"),
    [
        ("<think>\n", {"reasoning": "constrained"}),  # from the first token
        (ENDED, {"chat_template_kwargs": {"enable_thinking": False}}),  # the prompt ends the thoughts
    ],
)
def test_no_thoughts(thinking: Callable[[str], TestClient], end: str, fields: dict[str, Any]) -> None:
    choice = ask(thinking(end), json_schema=SCHEMA, **fields)
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize(
    "fields", [{"json_schema": SCHEMA}, {"regex": "yes|no"}, {"json_schema": SCHEMA, "stream": True}, {}]
)
def test_a_limit_on_the_thoughts(thinking: Callable[[str], TestClient], fields: dict[str, Any]) -> None:
    """After the limit, the mask forces the end of the thoughts, and then the constraint holds."""
    client = thinking("<think>\n")
    if fields.get("stream"):
        events = sse(client.post(CHAT, json={**USER, **fields, "max_reasoning_tokens": 6}).text)
        deltas = [choice["delta"] for event in events if event != "[DONE]" for choice in event["choices"]]
        message = {name: "".join(d.get(name, "") for d in deltas) for name in ("content", "reasoning_content")}
    else:
        choice = ask(client, **fields, max_reasoning_tokens=6)
        assert choice["finish_reason"] == ("stop" if fields else "length")
        message = choice["message"]
    if "regex" in fields:
        assert message["content"] in ("yes", "no")
    elif "json_schema" in fields:
        assert json.loads(message["content"])["a"] in (1, 2)
    tokenizer = client.app.state.context.engine.tokenizer  # type: ignore[attr-defined]
    assert 0 < len(tokenizer.encode(message["reasoning_content"], add_special_tokens=False)) <= 8
    assert "</think>" not in message["content"] + message["reasoning_content"]


def test_a_limit_without_thoughts(client: TestClient) -> None:
    error = client.post(CHAT, json={**USER, "max_reasoning_tokens": 3}).json()["error"]
    assert error["param"] == "max_reasoning_tokens"
    assert "--reasoning-format" in error["message"]
