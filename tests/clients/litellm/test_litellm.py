"""litellm: schemas, functions, streams, responses, and the errors that its router looks
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import litellm
import pytest


def test_the_page(check_section: Callable[[str], None]) -> None:
    check_section("litellm")


@pytest.fixture
def asked(shared: dict[str, Any]) -> dict[str, Any]:
    model = {
        "model": f"openai/{shared['MODEL']}",
        "api_base": shared["URL"],
        "api_key": shared["KEY"],
    }
    return {
        **model,
        "messages": [{"role": "user", "content": shared["TEXT"]}],
        "max_retries": 0,
    }


def test_streamed_functions(asked: dict[str, Any], shared: dict[str, Any]) -> None:
    function = {
        "name": "store",
        "description": "Store it.",
        "parameters": shared["Person"].model_json_schema(),
    }
    asked |= {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "stream": True,
    }
    answer = litellm.stream_chunk_builder(
        list(litellm.completion(**asked, parallel_tool_calls=False))
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "store"
    person = shared["Person"].model_validate_json(call.function.arguments)
    assert person == shared["PERSON"]


def test_responses(asked: dict[str, Any], shared: dict[str, Any]) -> None:
    messages = asked.pop("messages")
    response = litellm.responses(**asked, input=messages, text_format=shared["Person"])
    [message] = response.output
    person = shared["Person"].model_validate_json(message.content[0].text)
    assert person == shared["PERSON"]


def test_a_prompt_that_is_too_long(asked: dict[str, Any]) -> None:
    asked["messages"] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked)
