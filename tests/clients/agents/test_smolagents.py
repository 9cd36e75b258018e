"""smolagents: an agent of tool calls, whose requests have stop sequences beside the tools."""

from __future__ import annotations

from typing import Any

import pytest
import smolagents


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool(shared: dict[str, Any], stream: bool) -> None:
    @smolagents.tool
    def store(name: str) -> str:
        """Store a person.

        Args:
            name: of the person
        """
        return name

    model = smolagents.OpenAIModel(shared["MODEL"], api_base=shared["URL"], api_key=shared["KEY"], max_tokens=200)
    agent = smolagents.ToolCallingAgent([store], model, max_steps=1, stream_outputs=stream)
    agent.prompt_templates["system_prompt"] = "Store the person."  # smolagents' own exceeds the model's context
    first = next(each for each in agent.run(shared["TEXT"], stream=True) if isinstance(each, smolagents.ToolCall))
    assert {"store": "name", "final_answer": "answer"}[first.name] in first.arguments
