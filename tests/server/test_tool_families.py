"""Function calls in the formats of several families, served: the arguments are JSON that satisfies the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from serving import sse
from starlette.testclient import TestClient

CHAT = "/v1/chat/completions"
DICE = {
    "type": "object",
    "properties": {"sides": {"enum": [4, 6, 20]}, "loud": {"type": "boolean"}, "by": {"enum": ["hand", "cup"]}},
    "required": ["sides", "loud"],
    "additionalProperties": False,
}
REQUEST = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "roll_dice", "parameters": DICE}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 480,
}


@pytest.mark.parametrize(
    "family", ["hermes", "harmony", "kimi_k3", "deepseek_v4_1", "glm_4_7", "minimax_m3", "cohere", "qwen_3_5"]
)
def test_a_required_call(client_with: Callable[..., TestClient], family: str) -> None:
    client = client_with(tool_format=family)
    for seed in range(3):
        answer = client.post(CHAT, json={**REQUEST, "seed": seed})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "roll_dice"
        jsonschema.validate(json.loads(call["function"]["arguments"]), DICE)
        assert choice["finish_reason"] == "tool_calls"
        events = sse(client.post(CHAT, json={**REQUEST, "seed": seed, "stream": True}).text)
        deltas: list[Any] = [delta for event in events if event != "[DONE]" for delta in event["choices"]]
        parts = [each for delta in deltas for each in delta["delta"].get("tool_calls", [])]
        assert "".join(each["function"]["arguments"] for each in parts) == call["function"]["arguments"]
