"""haystack: an output type, and an agent loop that ends; chats and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from haystack.components.agents import Agent
from haystack.components.generators import chat
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


@pytest.mark.parametrize(
    "name", ["OpenAIChatGenerator", "OpenAIResponsesChatGenerator"]
)
def test_values(
    model_of: Callable[..., Any], shared: dict[str, Any], get_weather: Any, name: str
) -> None:
    def generator() -> Any:
        return model_of(
            "haystack", {"OpenAIChatGenerator": getattr(chat, name), "Secret": Secret}
        )

    option = {
        "OpenAIChatGenerator": "response_format",
        "OpenAIResponsesChatGenerator": "text_format",
    }[name]
    question = ChatMessage.from_user(shared["TEXT"])
    [reply] = generator().run([question], generation_kwargs={option: shared["Person"]})[
        "replies"
    ]
    person = shared["Person"].model_validate_json(reply.text)
    assert person == shared["PERSON"]

    agent = Agent(
        chat_generator=generator(), tools=[create_tool_from_function(get_weather)]
    )
    messages = agent.run(messages=[ChatMessage.from_user(shared["QUESTION"])])[
        "messages"
    ]
    assert [message.role.value for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert messages[-1].text == shared["ANSWER"]
