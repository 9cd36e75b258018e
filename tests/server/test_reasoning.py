"""The thinking phase: where it ends, what a constraint means beside it, and how the
answer shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


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


def test_thoughts_may_be_left_out(thinking: Callable[[str], TestClient]) -> None:
    client = thinking("<think>\n")
    asked = {
        "json_schema": SCHEMA,
        "max_reasoning_tokens": 6,
        "include_reasoning": False,
    }
    shown, hidden = (
        ask(client, **{**asked, "include_reasoning": True}),
        ask(client, **asked),
    )
    assert shown["message"].pop("reasoning_content")
    assert hidden["message"] == shown["message"]
    stream = client.post(CHAT, json={**USER, **asked, "stream": True}).text
    assert ("reasoning_content" in stream, '"content"' in stream) == (False, True)
    items = [
        client.post(
            "/v1/responses",
            json={"input": "hi", "seed": 3, **asked, "include_reasoning": choice},
        ).json()
        for choice in (True, False)
    ]
    assert [[item["type"] for item in each["output"]] for each in items] == [
        ["reasoning", "message"],
        ["message"],
    ]
    assert items[0]["usage"] == items[1]["usage"]


def test_complete_ends_the_thoughts_and_the_answer(
    thinking: Callable[[str], TestClient],
) -> None:
    choice = ask(
        thinking("<think>\n"), json_schema=SCHEMA, complete=True, max_tokens=60
    )
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert len(choice["message"]["reasoning_content"]) > 5


ENDED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("end", "fields"),
    [
        ("<think>\n", {"reasoning": "constrained"}),  # from the first token
        (
            ENDED,
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),  # the prompt ends the thoughts
    ],
)
def test_no_thoughts(
    thinking: Callable[[str], TestClient], end: str, fields: dict[str, Any]
) -> None:
    choice = ask(thinking(end), json_schema=SCHEMA, **fields)
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize(
    "fields", [{"json_schema": SCHEMA}, {}], ids=["schema", "free"]
)
def test_a_limit_on_the_thoughts(
    thinking: Callable[[str], TestClient], fields: dict[str, Any]
) -> None:
    """After the limit, the mask forces the end of the thoughts, and then the constraint
    holds."""
    client = thinking("<think>\n")
    choice = ask(client, **fields, max_reasoning_tokens=6)
    content, thoughts = (
        choice["message"]["content"],
        choice["message"]["reasoning_content"],
    )
    assert choice["finish_reason"] == ("stop" if fields else "length")
    assert not fields or json.loads(content)["a"] in (1, 2)
    tokenizer = client.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    assert 0 < len(tokenizer.encode(thoughts, add_special_tokens=False)) <= 8
    assert "</think>" not in content + thoughts


def test_a_limit_without_thoughts(client: TestClient) -> None:
    error = client.post(CHAT, json={**USER, "max_reasoning_tokens": 3}).json()["error"]
    assert error["param"] == "max_reasoning_tokens"
    assert "--reasoning-format" in error["message"]
