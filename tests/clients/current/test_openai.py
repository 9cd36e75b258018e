"""The openai package: chats and responses, whole and streamed, with schemas and with functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest


def test_the_page(run_section: Callable[[str], dict[str, Any]], shared: dict[str, Any]) -> None:
    names = run_section("openai")
    person = shared["Person"](name="Anna Weber", age=47, city="Hamburg")
    assert names["person"] == names["called"] == names["answered"] == person


@pytest.fixture(scope="module")
def client(shared: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=shared["URL"], api_key=shared["KEY"], max_retries=0)


def test_a_chat_streams_a_parsed_answer(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    asked = {"model": shared["MODEL"], "messages": [{"role": "user", "content": shared["TEXT"]}]}
    with client.chat.completions.stream(**asked, response_format=shared["Person"]) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(answer.choices[0].message.parsed, shared["Person"])


def test_a_chat_streams_parsed_arguments(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    asked = {"model": shared["MODEL"], "messages": [{"role": "user", "content": shared["TEXT"]}]}
    tools = [openai.pydantic_function_tool(shared["Person"])]
    with client.chat.completions.stream(**asked, tools=tools, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, shared["Person"])


def test_a_response_streams_a_parsed_answer(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    with client.responses.stream(model=shared["MODEL"], input=shared["TEXT"], text_format=shared["Person"]) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert isinstance(response.output_parsed, shared["Person"])


def test_responses_call_functions(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    """The loop of an application: the items of the answer, and the function's output, are the next input."""
    function = openai.pydantic_function_tool(shared["Person"])["function"]
    tool: Any = {"type": "function", **function}
    items: list[Any] = [{"role": "user", "content": shared["TEXT"]}]
    response = client.responses.create(
        model=shared["MODEL"], input=items, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    [call] = response.output
    assert call.type == "function_call"
    shared["Person"].model_validate_json(call.arguments)
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "stored"}]
    second = client.responses.create(model=shared["MODEL"], input=items, tools=[tool], max_output_tokens=50)
    assert second.output
    assert second.usage is not None
    assert response.usage is not None
    assert second.usage.input_tokens > response.usage.input_tokens


def test_the_asynchronous_client(shared: dict[str, Any]) -> None:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=shared["URL"], api_key=shared["KEY"]) as client:
            form = {"type": "json_object"}
            asked = {"model": shared["MODEL"], "messages": [{"role": "user", "content": "Describe as JSON: Ada is 8."}]}
            extra = {"complete": True}
            return await client.chat.completions.create(**asked, response_format=form, max_tokens=300, extra_body=extra)

    assert isinstance(json.loads(asyncio.run(run()).choices[0].message.content), dict)


def test_refusals_are_the_packages_errors(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=shared["MODEL"], input="x", previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model=shared["MODEL"], input="x")
