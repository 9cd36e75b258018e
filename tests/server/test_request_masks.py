"""What a request asks of its text beside a constraint: stop strings, allowed tokens,
bad words; and what it cost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import sse
from starlette.testclient import TestClient

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 60,
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TAG = {
    "type": "triggered_tags",
    "triggers": ["<n>"],
    "tags": [
        {
            "begin": "<n>",
            "content": {"type": "regex", "pattern": "[ab]{2,4}"},
            "end": "</n>",
        }
    ],
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": {"enum": ["ab\n", "Observation:"]}},
    {"response_format": {"type": "json_object"}, "whitespace_pattern": ""},
    {"regex": "(ab|ba){3}"},
    {"choice": ["x: ab", "y: ba"]},
    {"grammar": 'start: "a" "b"+ "\\n"'},
]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        HELLO
        if path == CHAT
        else {"prompt": "hello", "temperature": 0, "max_tokens": 60}
    )
    return {**prompt, **fields}


def ask(client: TestClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=body_of(path, **fields))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def text_of(body: dict[str, Any]) -> str:
    [choice] = body["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", CONSTRAINTS)
def test_stop_is_named_and_ends_no_constraint(
    client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    expected = ask(client, path, **fields, seed=1)
    assert "ignored" not in expected["guided"]
    body = ask(
        client, path, **fields, seed=1, stop=["a", "b", "Observation:", "\n", '"', "}"]
    )
    assert body["guided"]["ignored"] == ["stop"]
    assert body["choices"] == expected["choices"]
    chunks = sse(
        client.post(path, json=body_of(path, **fields, stop="b", stream=True)).text
    )[:-1]
    assert chunks[0]["guided"]["ignored"] == ["stop"]


def test_stop_sequences_and_calls_name_it_too(hermes: TestClient) -> None:
    message = {**HELLO, "model": "tiny", "choice": ["ab"], "stop_sequences": ["b"]}
    answer = hermes.post("/v1/messages", json=message).json()
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("ab", "end_turn")
    assert answer["guided"]["ignored"] == ["stop_sequences"]
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"const": "END"}}},
        },
    }
    body = ask(hermes, tools=[tool], tool_choice="required", stop="END", max_tokens=200)
    assert body["guided"]["ignored"] == ["stop"]
    both = ask(
        hermes,
        tools=[tool],
        regex="(ab){2}",
        stop=["b", "N"],
        logit_bias={**bias(hermes, "a")},
    )
    assert text_of(both) == "abab"


def bias(client: TestClient, text: str) -> dict[str, int]:
    [token] = client.post(
        "/tokenize", json={"prompt": text, "add_special_tokens": False}
    ).json()["tokens"]
    return {str(token): 100}


@pytest.mark.parametrize("stream", [False, True])
def test_the_free_text_of_a_tag_is_searched(client: TestClient, stream: bool) -> None:
    fields: dict[str, Any] = {
        "structural_tag": {"format": TAG},
        "temperature": 1,
        "max_tokens": 40,
    }
    text = text_of(ask(client, **fields, seed=4))
    cut = text[6:8]
    answer = client.post(
        CHAT, json={**HELLO, **fields, "seed": 4, "stop": [cut], "stream": stream}
    )
    choices = [
        each["choices"][0]
        for each in (sse(answer.text)[:-1] if stream else [answer.json()])
    ]
    shown = "".join(
        each.get("delta", each.get("message")).get("content") or "" for each in choices
    )
    assert (shown, choices[-1]["stop_reason"]) == (text[: text.index(cut)], cut)


def test_a_tag_is_not_searched_and_is_whole(client: TestClient) -> None:
    fields: dict[str, Any] = {
        "structural_tag": {
            "format": {**TAG, "at_least_one": True, "stop_after_first": True}
        }
    }
    [choice] = ask(client, **fields, stop=["a", "b", "n", "<", "</n>"])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["message"]["content"].startswith("<n>")
    assert choice["message"]["content"].endswith("</n>")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_only_allowed_tokens_and_the_end_are_there(
    client: TestClient, path: str
) -> None:
    tokens = [int(token) for letter in "xyz" for token in bias(client, letter)]
    for seed in range(4):
        text = text_of(
            ask(client, path, allowed_token_ids=tokens, temperature=1, seed=seed)
        )
        assert set(text) <= set("xyz")
    both = {"regex": "[a-z]{5}[0-9]?", "allowed_token_ids": tokens}
    assert set(text_of(ask(client, path, **both))) <= set("xyz")
    for stream in (False, True):
        fields = {"regex": "x[0-9]", "allowed_token_ids": tokens, "stream": stream}
        answer = client.post(path, json=body_of(path, **fields))
        error = sse(answer.text)[-1]["error"] if stream else answer.json()["error"]
        assert error["code"] == "dead_end"
        assert "allowed_token_ids" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bad_word_is_not_written(client: TestClient, path: str) -> None:
    fields = {"temperature": 1.5, "max_tokens": 80, "regex": "([ab]{1,3} ){12}"}
    texts = [text_of(ask(client, path, **fields, seed=seed)) for seed in range(6)]
    assert any(" ab " in text for text in texts)
    for seed in range(6):
        words = text_of(
            ask(client, path, **fields, seed=seed, bad_words=["ab", "bba"])
        ).split()
        assert len(words) == 12
        assert not {"ab", "bba"} & {*words}
    assert text_of(ask(client, path, choice=["ab", "b"], bad_words=["a"])) == "b"
    answer = client.post(path, json=body_of(path, choice=["abc"], bad_words=["bc"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "dead_end")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_without_the_end_token(
    client: TestClient, path: str, stream: bool
) -> None:
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    fields = {"choice": ["abba"], **logprobs, "stream": stream, **usage}
    answer = client.post(path, json=body_of(path, **fields))
    chunks = sse(answer.text)[:-1] if stream else [answer.json()]
    found = [
        each["logprobs"]
        for chunk in chunks
        for each in chunk["choices"]
        if each["logprobs"]
    ]
    tokens = [
        token
        for each in found
        for token in (each["tokens"] if "tokens" in each else each["content"])
    ]
    assert (
        "".join(token if isinstance(token, str) else token["token"] for token in tokens)
        == "abba"
    )
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens) + 1


def test_cached_tokens_are_counted_in_all_apis(client: TestClient) -> None:
    question = [
        {
            "role": "user",
            "content": "a question that is longer than several blocks " * 3,
        }
    ]
    common = {"max_tokens": 2, "temperature": 0}
    first = client.post(CHAT, json={"messages": question, **common}).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    again = client.post(CHAT, json={"messages": question, **common}).json()["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert again["prompt_tokens"] > cached >= again["prompt_tokens"] - 16
    body = {
        "messages": question,
        **common,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sse(client.post(CHAT, json=body).text)[-2]["usage"] == again
    responses = client.post(
        "/v1/responses", json={"input": question, "max_output_tokens": 2}
    ).json()["usage"]
    assert responses["input_tokens_details"] == {
        "cached_tokens": cached,
        "cache_write_tokens": 0,
    }
    usage = client.post(
        "/v1/messages", json={"model": "tiny", "messages": question, **common}
    ).json()["usage"]
    assert usage["cache_read_input_tokens"] == cached
    assert usage["input_tokens"] == again["prompt_tokens"] - cached
    prompts = [
        "one prompt, long enough for some blocks",
        "another prompt of about the same length",
    ]
    for expected in (False, True):
        usage = client.post(COMPLETIONS, json={"prompt": prompts, **common}).json()[
            "usage"
        ]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == expected
    assert json.dumps(usage)
