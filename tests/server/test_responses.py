"""`/v1/responses`: OpenAI's newer API, with OpenAI's own client and types as judges."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from openai.lib._tools import ResponsesPydanticFunctionTool
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter
from serving import named_events
from starlette.testclient import TestClient

PATH = "/v1/responses"
ASK: dict[str, Any] = {"input": "hi", "max_output_tokens": 150}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Light(BaseModel):
    """A traffic light."""

    color: Literal["red", "green"]
    on: bool


LIGHT: dict[str, Any] = {**Light.model_json_schema(), "additionalProperties": False}
TOOL = {
    "type": "function",
    "name": "Light",
    "description": "Set it.",
    "parameters": LIGHT,
    "strict": True,
}
CHAT_TOOL = {
    "type": "function",
    "function": {name: TOOL[name] for name in ("name", "description", "parameters")},
}
FORMAT = {"format": {"type": "json_schema", "name": "light", "schema": LIGHT}}


@pytest.fixture
def sdk(hermes: TestClient) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://testserver/v1",
        api_key="none",
        max_retries=0,
        http_client=hermes,
    )


def create(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    Response.model_validate(body)
    return body


def events_of(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has OpenAI's type, and the number after the
    one before."""
    answer = client.post(PATH, json={**ASK, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**ASK, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


class TestOpenAIClient:
    def test_it_parses_answers_and_streams(self, sdk: openai.OpenAI) -> None:
        response = sdk.responses.parse(model="tiny", input="hi", text_format=Light)
        assert response.status == "completed"
        assert response.guided["kind"] == "json_schema"  # type: ignore[attr-defined]
        with sdk.responses.stream(
            model="tiny", input="hi", text_format=Light
        ) as stream:
            kinds = [event.type.removeprefix("response.") for event in stream]
            streamed = stream.get_final_response()
        assert kinds[:4] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
        ]
        assert kinds[-4:] == [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert all(
            isinstance(each.output_parsed, Light) for each in (response, streamed)
        )

    def test_functions(self, sdk: openai.OpenAI) -> None:
        tool = openai.pydantic_function_tool(Light)["function"]
        asked: Any = {
            "model": "tiny",
            "input": "hi",
            "tools": [
                ResponsesPydanticFunctionTool({"type": "function", **tool}, Light)
            ],
            "tool_choice": {"type": "function", "name": "Light"},
        }
        with sdk.responses.stream(**asked) as streamed:
            [call] = streamed.get_final_response().output
        assert isinstance(call, ResponseFunctionToolCall)
        assert isinstance(call.parsed_arguments, Light)  # type: ignore[attr-defined]
        assert call.call_id.startswith("call_")


def test_a_conversation_is_the_same_as_a_chat(hermes: TestClient) -> None:
    """Items of answers are sent back as they are. The prompt, and so the answer, are
    those of the chat."""
    first = create(
        hermes, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    [call] = first["output"]
    thoughts = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "?"}],
    }
    told = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [],
    }
    told["content"] = [
        {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(thoughts, told, call),
        {"type": "function_call_output", "call_id": call["call_id"], "output": "done"},
        {"role": "developer", "content": "be short"},
    ]
    made = {"id": call["call_id"], "type": "function"}
    made["function"] = {"name": "Light", "arguments": call["arguments"]}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "?",
            "tool_calls": [made],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "done"},
        {"role": "developer", "content": "be short"},
    ]
    same = {"temperature": 0, "presence_penalty": 0.5}
    response = create(
        hermes,
        instructions="Be kind.",
        input=items,
        tools=[TOOL],
        max_output_tokens=20,
        **same,
    )
    body = {"messages": messages, "tools": [CHAT_TOOL], "max_tokens": 20, **same}
    chat = hermes.post("/v1/chat/completions", json=body).json()
    [message] = response["output"]
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (
        response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 20
    )
    assert (response["status"], message["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"text": FORMAT},
        {"regex": "[ab]{9}"},
    ],
)
def test_a_stream_is_the_answer_in_pieces(
    hermes: TestClient, fields: dict[str, Any]
) -> None:
    whole = create(hermes, **fields, seed=5)
    events = events_of(hermes, **fields, seed=5)
    last = events[-1]["response"]

    def comparable(response: dict[str, Any]) -> dict[str, Any]:
        items = [{**item, "id": 0, "call_id": 0} for item in response["output"]]
        return {**response, "output": items, "id": 0, "created_at": 0}

    assert comparable(last) == comparable(whole)
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = (
                texts.get(event["output_index"], "") + event["delta"]
            )
        elif event["type"] == "response.output_item.done":
            assert last["output"][event["output_index"]] == event["item"]
    assert texts == {index: _text(item) for index, item in enumerate(last["output"])}


def _text(item: dict[str, Any]) -> Any:
    return (
        item["arguments"]
        if item["type"] == "function_call"
        else item["content"][0]["text"]
    )


SUM = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: "1" ("+" /[1-9]/){1,3}',
}
CODE = {"type": "grammar", "syntax": "regex", "definition": '"[A-Z]{2}\n"'}


@pytest.mark.parametrize(
    ("form", "expected"), [(SUM, r"1(\+[1-9]){1,3}"), (CODE, '"[A-Z]{2}\n"')]
)
def test_a_custom_tool(hermes: TestClient, form: dict[str, Any], expected: str) -> None:
    custom = {
        "type": "custom",
        "name": "write",
        "description": "Write it.",
        "format": form,
    }
    asked = {
        "tools": [TOOL, custom],
        "tool_choice": {"type": "custom", "name": "write"},
        "seed": 3,
    }
    [call] = create(hermes, **asked)["output"]
    assert ResponseCustomToolCall.model_validate(call).name == "write"
    assert re.fullmatch(expected, call["input"])
    events = events_of(hermes, **asked)
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.custom_tool_call_input.delta"
    ]
    [done] = [
        event
        for event in events
        if event["type"] == "response.custom_tool_call_input.done"
    ]
    assert "".join(deltas) == done["input"] == call["input"]
    # The call and its output are sent back. A chat has the same prompt.
    output = {
        "type": "custom_tool_call_output",
        "call_id": call["call_id"],
        "output": "done",
    }
    items = [{"role": "user", "content": "hi"}, call, output]
    response = create(hermes, input=items, tools=[custom], max_output_tokens=2)
    grammar = {name: form[name] for name in ("syntax", "definition")}
    chat_form = {"type": "grammar", "grammar": grammar}
    chat_tool = {
        "type": "custom",
        "custom": {"name": "write", "description": "Write it.", "format": chat_form},
    }
    made = {
        "id": call["call_id"],
        "type": "custom",
        "custom": {"name": "write", "input": call["input"]},
    }
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "done"},
    ]
    chat = hermes.post(
        "/v1/chat/completions",
        json={"messages": messages, "tools": [chat_tool], "max_tokens": 2},
    )
    assert response["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


def test_formats(hermes: TestClient) -> None:
    text = create(hermes, text=FORMAT)["output"][0]["content"][0]["text"]
    Light.model_validate_json(text)
    limited = {"response_format": None, "max_output_tokens": 300, "complete": True}
    some = create(hermes, text={"format": {"type": "json_object"}}, **limited)[
        "output"
    ][0]["content"][0]["text"]
    assert isinstance(json.loads(some), dict)
    plain = create(
        hermes,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        max_output_tokens=3,
    )
    assert plain["guided"]["ignored"] == ["verbosity"]
    assert plain["text"] == {"format": {"type": "text"}}


def test_thoughts(thinking: Callable[[str], TestClient]) -> None:
    client = thinking("<think>\n")
    asked = {
        "text": FORMAT,
        "max_reasoning_tokens": 6,
        "reasoning": {"summary": "detailed"},
        "seed": 3,
    }
    response = create(client, **asked)
    thoughts, message = response["output"]
    assert (thoughts["type"], message["type"]) == ("reasoning", "message")
    Light.model_validate_json(message["content"][0]["text"])
    assert 5 <= response["usage"]["output_tokens_details"]["reasoning_tokens"] <= 8
    assert response["usage"]["output_tokens"] > 10
    assert response["guided"]["ignored"] == ["summary"]
    events = events_of(client, **asked)
    told = "".join(
        event["delta"]
        for event in events
        if event["type"] == "response.reasoning_text.delta"
    )
    assert told == thoughts["content"][0]["text"]


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview_2025_03_11", "code_interpreter", "mcp"]
)
def test_hosted_tools_beside_functions_are_named(hermes: TestClient, kind: str) -> None:
    hosted = {"type": kind, "server_label": "x", "container": {"type": "auto"}}
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": kind}, {"type": "function", "name": "Light"}],
    }
    for choice in ("required", allowed):
        response = create(
            hermes, tools=[hosted, TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        [call] = response["output"]
        assert (call["name"], response["guided"]["ignored"]) == ("Light", [kind])
        Light.model_validate_json(call["arguments"])
        assert [tool["name"] for tool in response["tools"]] == ["Light"]


def test_nothing_is_stored(hermes: TestClient) -> None:
    response = create(
        hermes,
        store=True,
        metadata={"a": "b"},
        truncation="disabled",
        max_output_tokens=2,
    )
    assert response["store"] is False
    assert response["guided"]["ignored"] == ["store", "metadata", "truncation"]
    assert hermes.get(f"{PATH}/{response['id']}").status_code == 404


def test_an_empty_answer_is_a_message(hermes: TestClient) -> None:
    tokenizer = hermes.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    [message] = create(
        hermes, regex="a?", logit_bias={str(tokenizer.eos_token_id): 100}
    )["output"]
    assert message["content"] == [
        {"type": "output_text", "annotations": [], "text": ""}
    ]


LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize("fields", [{}, {"text": FORMAT}, {"choice": ["a🦖🦖b", "ÄÖ"]}])
def test_logprobs_are_those_of_the_same_chat(
    hermes: TestClient, fields: dict[str, Any]
) -> None:
    asked = {"temperature": 0, "top_logprobs": 2, **fields}
    [message] = create(hermes, **asked, **LOGPROBS, max_output_tokens=30)["output"]
    part = message["content"][0]
    chat = {name: value for name, value in asked.items() if name != "text"}
    chat |= {"json_schema": LIGHT} if "text" in fields else {}
    told = {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "max_tokens": 30,
    }
    tokens = hermes.post("/v1/chat/completions", json={**told, **chat}).json()[
        "choices"
    ][0]["logprobs"]["content"]
    spelled = [token for token in tokens if token["bytes"]]
    assert part["logprobs"] == spelled[: len(part["logprobs"])]
    assert len(spelled) - len(part["logprobs"]) <= 1  # the end token is no text
    assert (
        b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode(
            errors="replace"
        )
        == part["text"]
    )
    assert {len(token["top_logprobs"]) for token in part["logprobs"]} == {2}


def test_streamed_logprobs_are_those_of_the_answer(hermes: TestClient) -> None:
    asked = {"temperature": 0, "choice": ["a🦖🦖b"], **LOGPROBS}
    events = events_of(hermes, **asked)
    by_delta = [
        event for event in events if event["type"] == "response.output_text.delta"
    ]
    told = [token for event in by_delta for token in event["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    [message] = create(hermes, **asked)["output"]
    assert told == done["logprobs"] == message["content"][0]["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == "a🦖🦖b"
    assert [token["top_logprobs"] for token in told] == [[]] * len(told)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_leave_out_thoughts_and_calls(
    thinking: Callable[[str], TestClient], hermes: TestClient, stream: bool
) -> None:
    """Tokens of markers are no text either. Without `include`, `top_logprobs` asks for
    them too."""
    cases: list[tuple[TestClient, dict[str, Any]]] = [
        (
            thinking("<think>"),
            {
                "regex": "[a-z]{8}",
                "max_reasoning_tokens": 5,
                "reasoning": {"effort": "low"},
            },
        ),
        (
            hermes,
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
    ]
    for client, fields in cases:
        asked = {**fields, "top_logprobs": 1}
        response = (
            events_of(client, **asked)[-1]["response"]
            if stream
            else create(client, **asked)
        )
        items = {item["type"]: item for item in response["output"]}
        assert items.keys() & {"reasoning", "function_call"}
        if "regex" in fields:
            [part] = items["message"]["content"]
            assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
            assert len(part["text"]) == 8
        assert str(response["output"]).count("top_logprobs") == (
            len(part["logprobs"]) if "regex" in fields else 0
        )


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "stores no responses",
        ),
        ({"background": True}, "background", ""),
        ({"n": 2}, "n", "should be 1"),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
            "top_logprobs",
            "20",
        ),
        ({"input": []}, "input", ""),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input[0].type",
            "'message'",
        ),
        (
            {"input": [{"type": "function_call", "name": "f"}]},
            "input[0]",
            "arguments, call_id",
        ),
        (
            {"text": {"format": {**FORMAT["format"], "schema": None}}},
            "text.format.schema",
            "text.format.schema",
        ),
        (
            {"text": {"format": {**FORMAT["format"], "schema": {"type": "strin"}}}},
            "text.format",
            "(at '/type')",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "offer functions"),
        ({"tools": [{"type": "local_shell"}, TOOL]}, "tools[0].type", "'function'"),
        (
            {
                "tools": [{"type": "file_search"}, TOOL],
                "tool_choice": {"type": "file_search"},
            },
            "tool_choice",
            "",
        ),
        (
            {"tools": [{"type": "mcp"}, {**TOOL, "parameters": {"type": "array"}}]},
            "tools[1].parameters",
            "an object",
        ),
        (
            {"tools": [TOOL, {"type": "function", "function": TOOL}]},
            "tools[1].function",
            "stand beside 'type'",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL]}]},
            "tools[0].tools",
            "side by side",
        ),
        (
            {"tools": [{**TOOL, "parameters": {"type": "array"}}]},
            "tools[0].parameters",
            "are an object",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "f",
                        "format": {**CODE, "definition": "["},
                    }
                ]
            },
            "tools[0].format",
            "",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "f",
                        "format": {**SUM, "definition": "x"},
                    }
                ]
            },
            "tools[0].format",
            "",
        ),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
            "tools[0].format",
            "is empty",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "Light",
        ),
    ],
)
def test_refusals(
    hermes: TestClient, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(hermes, **fields)
    assert error["param"] == param
    assert says in error["message"]
