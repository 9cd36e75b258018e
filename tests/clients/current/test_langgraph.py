"""langgraph: an agent loop that ends, and one with an output type; chats and
responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


@pytest.mark.parametrize("responses", [False, True])
def test_an_agent_loop(
    model_of: Callable[..., Any],
    shared: dict[str, Any],
    get_weather: Any,
    responses: bool,
) -> None:
    model = model_of("langgraph", {"ChatOpenAI": ChatOpenAI})
    model.use_responses_api = responses
    agent = create_react_agent(model, [get_weather], response_format=shared["Person"])
    messages = agent.invoke({"messages": [("user", shared["QUESTION"])]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == shared["ANSWER"]
    read = agent.invoke({"messages": [("user", shared["TEXT"])]})["structured_response"]
    assert read == shared["PERSON"]
