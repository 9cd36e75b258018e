"""google-adk, by its LiteLlm model: an output schema, and tools."""

from __future__ import annotations

import asyncio
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def last_event(
    shared: dict[str, Any], model_options: dict[str, Any], **options: Any
) -> Any:
    address = {"api_base": shared["URL"], "api_key": shared["KEY"]}
    model = LiteLlm(
        f"openai/{shared['MODEL']}", **address, max_tokens=200, **model_options
    )
    runner = InMemoryRunner(
        LlmAgent(name="clerk", model=model, **options), app_name="clients"
    )
    return asyncio.run(runner.run_debug(shared["TEXT"], quiet=True))[-1]


def test_output_schema(shared: dict[str, Any]) -> None:
    event = last_event(shared, {}, output_schema=shared["Person"])
    person = shared["Person"].model_validate_json(event.content.parts[0].text)
    assert person == shared["PERSON"]


def test_tools(shared: dict[str, Any]) -> None:
    stored = []

    def store(name: str, age: int, tool_context: Any) -> str:
        """Store a person."""
        stored.append((name, age))
        tool_context.actions.skip_summarization = True  # the result is the answer
        return "stored"

    event = last_event(shared, {"tool_choice": "required"}, tools=[store])
    assert stored[0] == ("Anna Weber", 47)
    assert event.content.parts[0].function_response.response == {"result": "stored"}
