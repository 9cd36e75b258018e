"""openai-agents: output types, tools and streams, over responses and over chats."""

import asyncio
from typing import Any

import agents
import openai
import pytest


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def model(request: pytest.FixtureRequest, shared: dict[str, Any]) -> Any:
    client = openai.AsyncOpenAI(
        base_url=shared["URL"], api_key=shared["KEY"], max_retries=0
    )
    return getattr(agents, request.param)(shared["MODEL"], client)


def test_streamed_tools(model: Any, shared: dict[str, Any]) -> None:
    """The result of the tool is the answer."""
    stored = []
    Person = shared["Person"]  # noqa: N806

    @agents.function_tool
    def store(person: Person) -> str:
        """Store a person."""
        stored.append(person)
        return "stored"

    agent = agents.Agent(
        "writer",
        model=model,
        tools=[store],
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False
        ),
        tool_use_behavior="stop_on_first_tool",
    )

    async def run() -> Any:
        result = agents.Runner.run_streamed(agent, shared["TEXT"])
        kinds = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        return result.final_output

    assert asyncio.run(run()) == "stored"
    assert stored == [Person(name="Anna Weber", age=47, city="Hamburg")]


def test_an_agent_loop(model: Any, shared: dict[str, Any], get_weather: Any) -> None:
    agent = agents.Agent(
        "clerk", model=model, tools=[agents.function_tool(get_weather)]
    )
    result = agents.Runner.run_sync(agent, shared["QUESTION"], max_turns=4)
    assert result.final_output == shared["ANSWER"]
    assert [
        item.output for item in result.new_items if item.type == "tool_call_output_item"
    ] == ["sunny in Lisbon"]


def test_a_second_turn(model: Any, shared: dict[str, Any]) -> None:
    """The tool's result goes back to the model, with an output type beside the tool."""

    @agents.function_tool
    def now() -> str:
        """Tell the time."""
        return "noon"

    settings, Person = agents.ModelSettings(tool_choice="now"), shared["Person"]  # noqa: N806
    agent = agents.Agent(
        "teller", model=model, tools=[now], output_type=Person, model_settings=settings
    )
    result = agents.Runner.run_sync(agent, shared["TEXT"], max_turns=6)
    assert isinstance(result.final_output, Person)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)
