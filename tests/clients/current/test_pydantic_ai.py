"""pydantic-ai: output by function calls and by response_format, an agent loop, streams;
chats and responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic_ai
import pytest
from pydantic_ai.models import openai as models
from pydantic_ai.providers.openai import OpenAIProvider


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, shared: dict[str, Any]) -> Any:
    provider = OpenAIProvider(base_url=shared["URL"], api_key=shared["KEY"])
    return getattr(models, request.param)(shared["MODEL"], provider=provider)


@pytest.mark.parametrize("mode", ["ToolOutput", "NativeOutput"])
def test_output_and_streams(model: Any, shared: dict[str, Any], mode: str) -> None:
    agent = pydantic_ai.Agent(
        model, output_type=getattr(pydantic_ai, mode)(shared["Person"])
    )
    person = shared["PERSON"]
    assert agent.run_sync(shared["TEXT"]).output == person

    async def run() -> Any:
        async with agent.run_stream(shared["TEXT"]) as result:
            return await result.get_output()

    assert asyncio.run(run()) == person


def test_an_agent_loop(model: Any, shared: dict[str, Any], get_weather: Any) -> None:
    result = pydantic_ai.Agent(model, tools=[get_weather]).run_sync(shared["QUESTION"])
    assert result.output == shared["ANSWER"]
    assert (result.usage.requests, result.usage.tool_calls) == (2, 1)
