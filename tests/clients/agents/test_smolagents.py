"""smolagents, with its own prompts of thousands of tokens, and stop sequences beside
the constraint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import smolagents


@pytest.fixture
def model(model_of: Callable[..., Any]) -> Any:
    return model_of("smolagents", {"OpenAIModel": smolagents.OpenAIModel})


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_loop(
    model: Any, shared: dict[str, Any], get_weather: Any, stream: bool
) -> None:
    agent = smolagents.ToolCallingAgent(
        [smolagents.tool(get_weather)], model, max_steps=4, stream_outputs=stream
    )
    steps = agent.run(shared["QUESTION"], stream=True)
    calls = [step for step in steps if isinstance(step, smolagents.ToolCall)]
    assert calls[0].name == "get_weather"
    assert calls[0].arguments == {"city": "Lisbon"}
    assert [call.name for call in calls[1:]] == ["final_answer"]
    assert "sunny in Lisbon" in calls[1].arguments["answer"]


def test_code_is_within_its_schema(model: Any, shared: dict[str, Any]) -> None:
    """The embedded model writes no Python, but the answer has the form of the library's
    schema."""
    agent = smolagents.CodeAgent(
        [], model, max_steps=1, use_structured_outputs_internally=True
    )
    agent.run(shared["QUESTION"])
    answer = json.loads(agent.memory.steps[1].model_output)
    assert {key: type(value) for key, value in answer.items()} == {
        "thought": str,
        "code": str,
    }
