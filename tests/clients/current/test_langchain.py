"""langchain-openai: `with_structured_output` in all methods, `bind_tools`, streams; chats and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import langchain_openai
import pytest


def test_the_page(run_section: Callable[[str], dict[str, Any]], shared: dict[str, Any]) -> None:
    names = run_section("langchain-openai")
    assert isinstance(names["person"], shared["Person"])
    shared["Person"].model_validate(names["called"])


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
@pytest.mark.parametrize("strict", [None, True])
def test_structured_output(model: Any, shared: dict[str, Any], method: str, strict: bool | None) -> None:
    chain = model.with_structured_output(shared["Person"], method=method, strict=strict)
    assert isinstance(chain.invoke(shared["TEXT"]), shared["Person"])


@pytest.mark.parametrize("choice", ["required", "Person"])
def test_tools_and_streams(model: Any, shared: dict[str, Any], choice: str) -> None:
    bound = model.bind_tools([shared["Person"]], tool_choice=choice, parallel_tool_calls=False)
    first, *others = bound.stream(shared["TEXT"])
    for answer in (bound.invoke(shared["TEXT"]), sum(others, first)):
        [call] = answer.tool_calls
        shared["Person"].model_validate(call["args"])
