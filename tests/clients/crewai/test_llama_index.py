"""llama-index's OpenAILike: structured output by response_format and by function calls;
tools that are not `strict`."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def model(shared: dict[str, Any]) -> OpenAILike:
    address = {"api_base": shared["URL"], "api_key": shared["KEY"]}
    return OpenAILike(
        shared["MODEL"],
        **address,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


@pytest.mark.parametrize("native", [False, True])
def test_structured_output(
    model: OpenAILike, shared: dict[str, Any], native: bool
) -> None:
    model.should_use_structured_outputs = native
    answer = model.as_structured_llm(shared["Person"]).complete(shared["TEXT"])
    assert answer.raw == shared["PERSON"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(model: OpenAILike, shared: dict[str, Any], stream: bool) -> None:
    def store(name: str, age: int, city: str) -> str:
        """Store a person."""
        return f"{name}, {age}, {city}"

    ask = model.stream_chat_with_tools if stream else model.chat_with_tools
    answer = ask(
        [FunctionTool.from_defaults(store)], user_msg=shared["TEXT"], tool_required=True
    )
    [call] = model.get_tool_calls_from_response(list(answer)[-1] if stream else answer)
    assert call.tool_kwargs == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}
