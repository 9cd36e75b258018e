"""The openai package: chats and responses, whole and streamed, with schemas and with functions."""

from __future__ import annotations

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


@pytest.mark.parametrize("by_call", [False, True])
def test_a_chat_streams_what_it_parses(client: openai.OpenAI, shared: dict[str, Any], by_call: bool) -> None:
    asked: dict[str, Any] = {"model": shared["MODEL"], "messages": [{"role": "user", "content": shared["TEXT"]}]}
    if by_call:
        asked |= {"tools": [openai.pydantic_function_tool(shared["Person"])], "tool_choice": "required"}
    else:
        asked["response_format"] = shared["Person"]
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert ({"tool_calls.function.arguments.done"} if by_call else {"content.delta", "content.done"}) <= kinds
    parsed = [call.function.parsed_arguments for call in message.tool_calls or ()] if by_call else [message.parsed]
    assert {type(each) for each in parsed} == {shared["Person"]}


def test_a_response_streams_a_parsed_answer(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    with client.responses.stream(model=shared["MODEL"], input=shared["TEXT"], text_format=shared["Person"]) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert isinstance(response.output_parsed, shared["Person"])


def test_refusals_are_the_packages_errors(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=shared["MODEL"], input="x", previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model=shared["MODEL"], input="x")
