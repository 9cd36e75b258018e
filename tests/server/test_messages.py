"""`/v1/messages`: Anthropic's API. `tests/clients` uses Anthropic's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving import named_events
from starlette.testclient import TestClient

PATH = "/v1/messages"
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 150,
}
LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["color", "on"],
    "additionalProperties": False,
}
TOOL = {"name": "light", "description": "Set it.", "input_schema": LIGHT}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "light", "description": "Set it.", "parameters": LIGHT},
}
ONE_CALL = {
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
SEARCH = {"type": "web_search_20260318", "name": "web_search", "max_uses": 3}
FORMAT = {"type": "json_schema", "schema": LIGHT}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2025-01-01"}

Make = Callable[..., TestClient]


def create(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**ASK, **fields}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert (body["type"], body["role"], body["model"]) == (
        "message",
        "assistant",
        "tiny",
    )
    return body


def events_of(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={**ASK, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the message of a stream, as Anthropic's clients do."""
    message: dict[str, Any] = events[0]["message"]
    assert [
        event["type"] for event in events if "content_block" not in event["type"]
    ] == [*("message_start", "message_delta", "message_stop")]
    parts: list[str] = []
    for event in events[1:-1]:
        blocks = message["content"]
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                parts = []
            case "content_block_delta":
                kind = event["delta"].pop("type")
                [text] = event["delta"].values()
                if kind == "signature_delta":
                    blocks[-1]["signature"] = text
                else:
                    parts.append(text)
            case "content_block_stop":
                whole = "".join(parts)
                name = {"tool_use": "input"}.get(blocks[-1]["type"], blocks[-1]["type"])
                blocks[-1][name] = json.loads(whole) if name == "input" else whole
            case "message_delta":
                message |= {
                    **event["delta"],
                    "usage": event["usage"],
                    "guided": event["guided"],
                }
    return message


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    return error_of(client.post(PATH, json={**ASK, **fields}), 400)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    body = answer.json()
    assert (answer.status_code, body["type"]) == (status, "error"), answer.text
    error: dict[str, Any] = body["error"]
    return error


def test_a_conversation_is_the_same_as_a_chat(hermes: TestClient) -> None:
    """Blocks of answers are sent back as they are. The prompt, and so the answer, are
    those of the chat."""
    first = create(hermes, **ONE_CALL)
    [call] = first["content"]
    assert first["stop_reason"] == "tool_use"
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "done", **cached}],
    }
    thoughts = [
        {"type": "thinking", "thinking": "?", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    asked = {
        "system": [{"type": "text", "text": "Be kind.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
            {
                "role": "assistant",
                "content": [*thoughts, {"type": "text", "text": "So"}, call],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            {"role": "system", "content": "be short"},
        ],
    }
    made = {"id": call["id"], "type": "function"}
    made["function"] = {"name": "light", "arguments": json.dumps(call["input"])}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "?",
            "tool_calls": [made],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "be short"},
    ]
    same = {"temperature": 0, "presence_penalty": 0.5, "max_tokens": 20}
    message = create(hermes, **asked, tools=[TOOL], **same)
    chat = hermes.post(
        CHAT, json={"messages": messages, "tools": [CHAT_TOOL], **same}
    ).json()
    assert message["content"] == [
        {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    ]
    read = (
        message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    )
    assert read == chat["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    counted = hermes.post(
        f"{PATH}/count_tokens", json={"model": "tiny", **asked, "tools": [TOOL]}
    ).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    "fields", [ONE_CALL, {"output_config": {"format": FORMAT}}, {"regex": "[ab]{9}"}]
)
def test_a_stream_is_the_answer_in_pieces(
    hermes: TestClient, fields: dict[str, Any]
) -> None:
    whole = create(hermes, **fields, seed=5)
    streamed = gathered(events_of(hermes, **fields, seed=5))

    def comparable(message: dict[str, Any]) -> dict[str, Any]:
        return {
            **message,
            "id": 0,
            "content": [{**block, "id": 0} for block in message["content"]],
        }

    assert comparable(streamed) == comparable(whole)
    assert streamed["usage"]["output_tokens"] > 5


@pytest.mark.parametrize("place", ["output_config", "output_format", "json_schema"])
def test_formats(hermes: TestClient, place: str) -> None:
    given = {
        "output_config": {"format": FORMAT, "effort": "low"},
        "output_format": FORMAT,
        "json_schema": LIGHT,
    }
    message = create(hermes, **{place: given[place]})
    [block] = message["content"]
    assert json.loads(block["text"]).keys() == {"color", "on"}
    assert (message["stop_reason"], message["guided"]["kind"]) == (
        "end_turn",
        "json_schema",
    )


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "none"}, set()),
        ({"type": "tool", "name": "other"}, {"other"}),
        (ONE_CALL["tool_choice"], {"light"}),
    ],
)
def test_tool_choice(hermes: TestClient, choice: Any, called: set[str]) -> None:
    tools = (
        [TOOL]
        if called == {"light"}
        else [TOOL, {**TOOL, "name": "other", "type": "custom"}]
    )
    message = create(hermes, tools=tools, tool_choice=choice)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert {call["name"] for call in calls} == called
    assert all(call["input"].keys() == {"color", "on"} for call in calls)
    assert (message["stop_reason"] == "tool_use") == bool(called)


def test_a_call_that_is_cut_off(hermes: TestClient) -> None:
    length = create(hermes, **ONE_CALL, seed=1)["usage"]["output_tokens"]
    cut = {**ONE_CALL, "seed": 1, "max_tokens": length - 15}
    message = create(hermes, **cut)
    assert (message["stop_reason"], message["content"][0]["input"]) == (
        "max_tokens",
        {},
    )
    pieces = [
        event["delta"]["partial_json"]
        for event in events_of(hermes, **cut)
        if "partial_json" in str(event)
    ]
    assert "".join(pieces).startswith("{")


def test_stop_sequences(client: TestClient) -> None:
    same = {"temperature": 0, "max_tokens": 12}
    message = create(client, **same)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    text = message["content"][0]["text"]
    stopped = create(client, **same, stop_sequences=["no such text", text[4:7]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == (
        "stop_sequence",
        text[4:7],
    )
    assert stopped["content"][0]["text"] == text[: text.index(text[4:7])]


def test_a_schema_that_cannot_be_enforced_is_named(hermes: TestClient) -> None:
    tools = [
        {
            **TOOL,
            "input_schema": {
                "type": "object",
                "properties": {"a": {"$ref": "https://example.org/a"}},
            },
        }
    ]
    message = create(hermes, tools=tools, max_tokens=3)
    assert message["guided"]["not_enforced"] == ["tools[0].input_schema/properties/a"]


def test_max_tokens_may_exceed_the_context(client: TestClient) -> None:
    message = create(
        client, max_tokens=32_000, logit_bias={"0": -100}, regex="[ab]{2000}"
    )
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 512
    too_long = refusal(client, messages=[{"role": "user", "content": "word " * 700}])
    assert too_long["message"].startswith(
        "messages: This model's maximum context length is 512 tokens."
    )


def test_the_last_message_is_continued(client: TestClient) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    same = {"temperature": 0, "max_tokens": 9}
    message = create(client, messages=begun, **same)
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    chat = client.post(CHAT, json={"messages": begun, **continued, **same}).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_an_empty_answer_is_a_text(hermes: TestClient) -> None:
    tokenizer = hermes.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    empty = {"regex": "a?", "logit_bias": {str(tokenizer.eos_token_id): 100}}
    assert create(hermes, **empty)["content"] == [{"type": "text", "text": ""}]
    assert gathered(events_of(hermes, **empty))["content"] == [
        {"type": "text", "text": ""}
    ]


class TestThinking:
    def test_its_budget_is_enforced(
        self, thinking: Callable[[str], TestClient]
    ) -> None:
        thinker = thinking("<think>\n")
        asked = {
            "output_config": {"format": FORMAT},
            "thinking": {"type": "enabled", "budget_tokens": 6},
            "seed": 3,
        }
        message = create(thinker, **asked)
        thoughts, answer = message["content"]
        assert (thoughts["type"], answer["type"]) == ("thinking", "text")
        assert thoughts["signature"] == message["id"]
        assert thoughts["thinking"]
        assert json.loads(answer["text"]).keys() == {"color", "on"}
        streamed = gathered(events_of(thinker, **asked))
        assert [block.get("thinking") for block in streamed["content"]] == [
            thoughts["thinking"],
            None,
        ]
        assert streamed["content"][0]["signature"] == streamed["id"]

    def test_a_model_without_it_says_so(self, client: TestClient) -> None:
        message = create(
            client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=3
        )
        assert message["guided"]["ignored"] == ["thinking"]


def test_hosted_tools_beside_others_are_named(hermes: TestClient) -> None:
    fetch = {
        "type": "web_fetch_20260209",
        "name": "web_fetch",
        "allowed_domains": ["a.org"],
    }
    message = create(hermes, **{**ONE_CALL, "tools": [SEARCH, TOOL, fetch]})
    [call] = message["content"]
    assert (call["name"], message["guided"]["ignored"]) == (
        "light",
        ["web_search_20260318", "web_fetch_20260209"],
    )
    assert call["input"]["color"] in ("red", "green")


def past(block: dict[str, Any]) -> dict[str, Any]:
    """Return the messages of a conversation that begins with a block."""
    return {"messages": [{"role": "assistant", "content": [block]}, *ASK["messages"]]}


def test_what_has_no_effect(client_with: Make) -> None:
    """Fields of blocks and tools that clients always send are no error in strict
    servers."""
    cached = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "hi", "citations": None, **cached}]
    asked = {
        "messages": [{"role": "user", "content": content}],
        "metadata": {"user_id": "u"},
        "max_tokens": 3,
    }
    assert create(client_with(), **asked)["guided"]["ignored"] == [
        "metadata",
        "cache_control",
    ]
    assert create(client_with(strict_fields=True), **asked)["guided"] is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0]",
            "Invalid 'messages[0].content[0]': type tool_use needs id, name, input",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": None}, "max_tokens", ""),
        ({"model": None}, "model", ""),
        ({"n": 2}, "n", "should be 1"),
        (
            {"tools": [{"type": "web_search_20260318", "name": "web_search"}]},
            "tools",
            "offer functions",
        ),
        (
            {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]},
            "tools",
            "bash has no input_schema",
        ),
        (
            {
                "tools": [TOOL, SEARCH],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
            "no tool 'web_search'",
        ),
        (
            past({"type": "tool_use", "id": "", "name": "f", "input": {}}),
            "messages[0].content[0].id",
            "at least 1",
        ),
        (
            past({"type": "tool_use", "id": "a", "name": "", "input": {}}),
            "messages[0].content[0].name",
            "at least 1",
        ),
        (
            past({"type": "tool_result", "tool_use_id": ""}),
            "messages[0].content[0].tool_use_id",
            "at least 1",
        ),
        (
            past({"type": "redacted_thinking"}),
            "messages[0].content[0]",
            "redacted_thinking needs data",
        ),
        (
            {"tools": [{**TOOL, "strict": True, "input_schema": {"type": "strin"}}]},
            "tools[0].input_schema",
            "[0].input_schema: ",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            "",
        ),
        (
            {"output_config": {"format": {**FORMAT, "schema": {"type": "strin"}}}},
            "output_config.format",
            "(at '/type')",
        ),
        (
            {"stop_token_ids": [5], "regex": "[ab]+"},
            "stop_token_ids",
            "stop_token_ids could cut",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "MCP"),
        ({"json_shema": {}}, "json_shema", "json_schema"),
        ({"thread": {"type": "create"}}, "thread", "send all messages"),
    ],
)
def test_refusals(
    hermes: TestClient, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(hermes, **fields)
    assert (error["type"], error["details"]["param"]) == (
        "invalid_request_error",
        param,
    )
    assert says in error["message"]


class TestErrors:
    def test_keys(self, client_with: Make) -> None:
        client = client_with(api_key="sesame")
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            answer = client.post(PATH, json=ASK, headers=headers)
            assert error_of(answer, 401)["type"] == "authentication_error"
        for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
            assert (
                client.post(
                    PATH, json={**ASK, "max_tokens": 1}, headers=headers
                ).status_code
                == 200
            )

    def test_types_of_errors(self, client_with: Make) -> None:
        client = client_with(max_body_bytes=10_000)
        assert (
            error_of(client.post(PATH, json={**ASK, "model": "x"}), 404)["type"]
            == "not_found_error"
        )
        assert error_of(client.get(f"{PATH}/batches"), 404)["type"] == "not_found_error"
        assert (
            error_of(client.post(PATH, json={**ASK, "system": "x" * 20_000}), 413)[
                "type"
            ]
            == "request_too_large"
        )
        threaded = error_of(
            client.post(PATH, json={**ASK, "thread": {"type": "create"}}), 400
        )
        # the client goes on without
        assert threaded["details"]["error_code"] == "thread_unsupported_request"
        assert (
            error_of(client.post(f"{PATH}/count_tokens", json={}), 400)["type"]
            == "invalid_request_error"
        )
        client.app.state.context.shutting_down = True  # type: ignore[attr-defined]
        answer = client.post(PATH, json=ASK)
        assert error_of(answer, 503)["type"] == "overloaded_error"
        assert answer.headers["request-id"]

    def test_a_base_url_that_ends_with_v1(self, client: TestClient) -> None:
        assert (
            "without /v1"
            in client.post(f"/v1{PATH}", json=ASK).json()["error"]["message"]
        )

    def test_a_failure_in_a_stream(self, failing: TestClient) -> None:
        events = events_of(failing, model="guided-default", regex="[0-9]{30}")
        assert (events[-1]["type"], events[-1]["error"]["type"]) == (
            "error",
            "api_error",
        )
        assert re.fullmatch(
            "[0-9]+",
            "".join(event["delta"]["text"] for event in events if "delta" in event),
        )
