"""ollama: streams, tools, an agent loop, prompts, the lists of models, and its
exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest


@pytest.fixture
def address(shared: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {shared['KEY']}"}
    return {"host": shared["URL"].removesuffix("/v1"), "headers": headers}


@pytest.fixture
def client(address: dict[str, Any]) -> Iterator[ollama.Client]:
    with ollama.Client(**address) as opened:
        yield opened


@pytest.fixture
def asked(shared: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": shared["MODEL"],
        "messages": [{"role": "user", "content": shared["TEXT"]}],
    }


def test_streams(
    client: ollama.Client,
    address: dict[str, Any],
    asked: dict[str, Any],
    shared: dict[str, Any],
) -> None:
    asked |= {"format": shared["Person"].model_json_schema(), "stream": True}
    chunks = list(client.chat(**asked))
    text = "".join(chunk.message.content for chunk in chunks)
    assert len(chunks) > 5
    assert shared["Person"].model_validate_json(text).name == "Anna Weber"
    assert (chunks[-1].done, chunks[-1].done_reason) == (True, "stop")
    assert chunks[-1].total_duration > chunks[-1].eval_duration > 0

    async def texts() -> list[str]:
        return [
            chunk.message.content
            async for chunk in await ollama.AsyncClient(**address).chat(**asked)
        ]

    assert "".join(asyncio.run(texts())) == text


def test_an_agent_loop(
    client: ollama.Client,
    asked: dict[str, Any],
    shared: dict[str, Any],
    get_weather: Any,
) -> None:
    asked["messages"] = [{"role": "user", "content": shared["QUESTION"]}]
    answer = client.chat(**asked, tools=[get_weather])
    [call] = answer.message.tool_calls
    told = {
        "role": "tool",
        "tool_name": call.function.name,
        "content": get_weather(**call.function.arguments),
    }
    asked["messages"] += [answer.message, told]
    after = client.chat(**asked, tools=[get_weather], options={"num_predict": 20})
    assert (after.message.content, after.message.tool_calls) == (shared["ANSWER"], None)
    assert after.prompt_eval_count > answer.prompt_eval_count


def test_prompts_and_logprobs(client: ollama.Client, shared: dict[str, Any]) -> None:
    options = ollama.Options(temperature=0, num_predict=400, num_ctx=2048)
    answer = client.generate(
        shared["MODEL"], shared["TEXT"], format="json", options=options, logprobs=True
    )
    assert answer.response.startswith("{")
    assert "".join(token.token for token in answer.logprobs) == answer.response
    assert answer.eval_count - 1 <= len(answer.logprobs) <= answer.eval_count


def test_models(client: ollama.Client, shared: dict[str, Any]) -> None:
    [model] = client.list().models
    shown = client.show(model.model)
    assert model.model == shared["MODEL"]
    assert shown.capabilities == ["completion", "tools"]
    assert (
        client.chat(model.model).done_reason
        == client.generate(model.model).done_reason
        == "load"
    )


def test_exceptions(
    client: ollama.Client, address: dict[str, Any], asked: dict[str, Any]
) -> None:
    for changes, status, message in (
        ({"model": "other"}, 404, "'other' does not exist"),
        (
            {"format": {"type": "strin"}, "stream": True},
            400,
            "format: 'strin' is not valid",
        ),
        (
            {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]},
            400,
            "images are not supported",
        ),
    ):
        with pytest.raises(ollama.ResponseError, match=message) as raised:
            list(client.chat(**{**asked, **changes}))
        assert raised.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="Incorrect API key"):
        ollama.Client(address["host"]).chat(**asked)
