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


def test_constrained_from_the_first_token(thinking: Callable[[str], TestClient]) -> None:
    choice = ask(thinking("<think>\n"), json_schema=SCHEMA, reasoning="constrained")
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert "reasoning_content" not in choice["message"]


def test_a_prompt_that_ends_the_thoughts(thinking: Callable[[str], TestClient]) -> None:
    end = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    client = thinking(end)
    choice = ask(client, json_schema=SCHEMA, chat_template_kwargs={"enable_thinking": False})
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_answer_are_split(thinking: Callable[[str], TestClient], stream: bool) -> None:
    """The model thinks if it wants to: here, a schema is the answer, and its grammar forces the way there."""
    client = thinking("")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "<think>so</think>\n\nyes"}}
    fields = {"structural_tag": tag, "reasoning": "constrained"}
    assert ask(client, **fields)["message"]["content"] == "<think>so</think>\n\nyes"
    forced = {"logit_bias": {}, "json_schema": SCHEMA}
    body = client.post(CHAT, json={**USER, **forced, "stream": stream})
    if stream:
        events = sse(body.text)
        text = "".join(c["delta"].get("content", "") for e in events if e != "[DONE]" for c in e["choices"])
    else:
        text = body.json()["choices"][0]["message"]["content"]
    assert text == "" or json.loads(text)["a"] in (1, 2)
