"""langchain-openai: `with_structured_output` in all methods, `bind_tools`, streams;
chats and responses."""

from __future__ import annotations

from typing import Any

import langchain_openai
import pytest


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def model(request: pytest.FixtureRequest, shared: dict[str, Any]) -> Any:
    return langchain_openai.ChatOpenAI(
        model=shared["MODEL"],
        base_url=shared["URL"],
        api_key=shared["KEY"],
        max_retries=0,
        use_responses_api=request.param,
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, shared: dict[str, Any], method: str) -> None:
    chain = model.with_structured_output(shared["Person"], method=method, strict=True)
    assert chain.invoke(shared["TEXT"]) == shared["PERSON"]


def test_streamed_tools(model: Any, shared: dict[str, Any]) -> None:
    bound = model.bind_tools(
        [shared["Person"]], tool_choice="Person", parallel_tool_calls=False
    )
    first, *others = bound.stream(shared["TEXT"])
    [call] = sum(others, first).tool_calls
    assert call["args"] == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}
