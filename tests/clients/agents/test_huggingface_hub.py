"""huggingface_hub: schemas as TGI takes them (`value`) and as OpenAI does, tools, and
streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest


@pytest.fixture
def ask(model_of: Callable[..., Any], shared: dict[str, Any]) -> Callable[..., Any]:
    client = model_of(
        "huggingface_hub", {"InferenceClient": huggingface_hub.InferenceClient}
    )
    messages = [{"role": "user", "content": shared["TEXT"]}]

    def chat(**options: Any) -> Any:
        return client.chat_completion(
            messages, model=shared["MODEL"], max_tokens=200, **options
        )

    return chat


@pytest.fixture
def person(shared: dict[str, Any]) -> Any:
    return shared["PERSON"]


@pytest.mark.parametrize("kind", ["json", "json_object", "json_schema"])
def test_schemas(ask: Callable[..., Any], person: Any, kind: str) -> None:
    schema = person.model_json_schema()
    constraint = (
        {"json_schema": {"name": "person", "schema": schema}}
        if kind == "json_schema"
        else {"value": schema}
    )
    form = {"type": kind, **constraint}
    whole = ask(response_format=form).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in ask(response_format=form, stream=True)
    )
    assert type(person).model_validate_json(whole) == person
    assert streamed == whole


def test_tools(ask: Callable[..., Any], person: Any) -> None:
    function = {
        "name": "store",
        "description": "Store it.",
        "parameters": person.model_json_schema(),
    }
    answer = ask(
        tools=[{"type": "function", "function": function}], tool_choice="required"
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "store"
    assert type(person).model_validate_json(call.function.arguments) == person
