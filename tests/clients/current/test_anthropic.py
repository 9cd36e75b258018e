"""anthropic: streams, an agent loop, counted tokens, and its exceptions."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest


@pytest.fixture
def client(shared: dict[str, Any]) -> anthropic.Anthropic:
    url = shared["URL"].removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=shared["KEY"], max_retries=0)


@pytest.fixture
def asked(shared: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": shared["TEXT"]}]
    return {"model": shared["MODEL"], "max_tokens": 200, "messages": messages}


def prompt_tokens(message: Any) -> int:
    """Return the number of the prompt's tokens. Those in the prefix cache are counted
    apart, as Anthropic does."""
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_streams(
    client: anthropic.Anthropic, asked: dict[str, Any], shared: dict[str, Any]
) -> None:
    with client.messages.stream(**asked, output_format=shared["Person"]) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 1
    assert message.parsed_output == shared["PERSON"]
    assert message.stop_reason == "end_turn"
    counted = client.messages.count_tokens(
        model=asked["model"], messages=asked["messages"]
    )
    assert prompt_tokens(message) == counted.input_tokens


def test_streamed_tools(
    client: anthropic.Anthropic, asked: dict[str, Any], shared: dict[str, Any]
) -> None:
    tool = {
        "name": "store",
        "description": "Store it.",
        "input_schema": shared["Person"].model_json_schema(),
    }
    with client.messages.stream(
        **asked, tools=[tool], tool_choice={"type": "tool", "name": "store"}
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    [call] = message.content
    assert call.input == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}
    assert message.stop_reason == "tool_use"
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_loop(
    client: anthropic.Anthropic,
    asked: dict[str, Any],
    shared: dict[str, Any],
    stream: bool,
) -> None:
    """The tool's results go back to the model, until the limit: `tool_choice` demands a
    call in each turn."""
    stored = []

    @anthropic.beta_tool(input_schema=shared["Person"])
    def store(name: str, age: int, city: str) -> str:
        """Store a person."""
        stored.append(shared["Person"](name=name, age=age, city=city))
        return "stored"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        **asked, tools=[store], tool_choice=choice, max_iterations=2, stream=stream
    )
    messages = [each.get_final_message() if stream else each for each in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert prompt_tokens(messages[1]) > prompt_tokens(messages[0])
    assert messages[1].usage.cache_read_input_tokens > 0  # the first turn
    assert stored[0] == shared["PERSON"]


def test_an_agent_loop_that_ends(
    client: anthropic.Anthropic,
    asked: dict[str, Any],
    shared: dict[str, Any],
    get_weather: Any,
) -> None:
    asked["messages"] = [{"role": "user", "content": shared["QUESTION"]}]
    runner = client.beta.messages.tool_runner(
        **asked, tools=[anthropic.beta_tool(get_weather)]
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[1].content[0].text == shared["ANSWER"]


def test_exceptions(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    with pytest.raises(
        anthropic.BadRequestError,
        match=r"This model's maximum context length .*'messages'",
    ):
        client.messages.create(
            **{**asked, "messages": [{"role": "user", "content": "word " * 5000}]}
        )
    with pytest.raises(
        anthropic.BadRequestError, match=r"output_config.format: .*'/type'"
    ):
        client.messages.create(
            **asked,
            output_config={
                "format": {"type": "json_schema", "schema": {"type": "strin"}}
            },
        )
    with pytest.raises(anthropic.AuthenticationError) as raised:
        client.with_options(api_key="wrong").messages.create(**asked)
    assert raised.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**asked, "model": "other"})
