"""`/api`: Ollama's API. `tests/clients` uses Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

CHAT = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["color", "on"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "light", "description": "Set it.", "parameters": LIGHT},
}
ONE_CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
TIMES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def post(client: TestClient, path: str, **fields: Any) -> httpx.Response:
    prompt = {"messages": HI} if path == "/api/chat" else {"prompt": "hi"}
    answer: httpx.Response = client.post(
        path, json={"model": "tiny", **prompt, **fields}
    )
    return answer


def whole(client: TestClient, path: str = "/api/chat", **fields: Any) -> dict[str, Any]:
    answer = post(client, path, stream=False, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert (body["model"], body["done"]) == ("tiny", True)
    return body


def lines(
    client: TestClient, path: str = "/api/chat", **fields: Any
) -> list[dict[str, Any]]:
    """Return the lines of a stream, which is the default."""
    answer = post(client, path, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def gathered(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the lines of a chat or of a prompt, as Ollama's clients do."""
    *_, last = found
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    joined: dict[str, Any] = {}
    for line in found:
        said = line.get("message") or {
            name: line[name] for name in ("response", "thinking") if name in line
        }
        logprobs = {"logprobs": line["logprobs"]} if "logprobs" in line else {}
        for name, value in {**said, **logprobs}.items():
            joined[name] = (
                joined[name] + value if name in joined and name != "role" else value
            )
    return {
        **joined,
        "done_reason": last["done_reason"],
        "eval_count": last["eval_count"],
        "guided": last["guided"],
    }


def flat(answer: dict[str, Any]) -> dict[str, Any]:
    """Bring a whole answer in the form of `gathered`, without ids."""
    names = ("response", "thinking", "logprobs", "done_reason", "eval_count", "guided")
    fields = {
        **answer.get("message", {}),
        **{name: answer[name] for name in names if name in answer},
    }
    for call in fields.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return fields


def refusal(
    client: TestClient, path: str = "/api/chat", status: int = 400, **fields: Any
) -> str:
    answer = post(client, path, **fields)
    assert (answer.status_code, answer.json().keys()) == (status, {"error"}), (
        answer.text
    )
    message: str = answer.json()["error"]
    return message


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    "fields",
    [
        {"format": LIGHT},
        {"regex": "[ab]{9}", "logprobs": True, "top_logprobs": 2},
        {"options": {"num_predict": 4}},
    ],
)
def test_a_stream_is_the_answer_in_lines(
    hermes: TestClient, path: str, fields: dict[str, Any]
) -> None:
    answer = flat(whole(hermes, path, seed=5, **fields))
    streamed = gathered(lines(hermes, path, seed=5, **fields))
    assert streamed == answer
    text = answer["content" if path == "/api/chat" else "response"]
    if "logprobs" in fields:
        assert "".join(token["token"] for token in answer["logprobs"]) == text
        assert [len(token["top_logprobs"]) for token in answer["logprobs"]] == [
            2
        ] * len(answer["logprobs"])
    if "format" in fields:
        assert json.loads(text).keys() == {"color", "on"}


def test_calls_come_whole_in_one_line(hermes: TestClient) -> None:
    message = whole(hermes, **ONE_CALL, seed=2)["message"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "light"
    assert call["function"]["arguments"].keys() == {"color", "on"}
    streamed = gathered(lines(hermes, **ONE_CALL, seed=2))
    assert [each["function"] for each in streamed["tool_calls"]] == [call["function"]]
    cut = whole(
        hermes, **ONE_CALL, seed=2, options={"num_predict": streamed["eval_count"] - 15}
    )
    assert ("tool_calls" in cut["message"], cut["done_reason"]) == (False, "length")


def test_a_chat_is_the_same_as_openais(hermes: TestClient) -> None:
    """Options have other names, and calls have no ids: results have the order of the
    calls."""
    call = {"function": {"name": "light", "arguments": {"color": "red", "on": True}}}
    told = [
        {"role": "system", "content": "Be kind."},
        *HI,
        {
            "role": "assistant",
            "content": "",
            "thinking": "?",
            "tool_calls": [call, call],
        },
        *(
            {"role": "tool", "tool_name": "light", "content": content}
            for content in ("done", "again")
        ),
    ]
    options = {
        "temperature": 0.5,
        "num_predict": 12,
        "repeat_penalty": 1.2,
        "top_k": 9,
        "seed": 3,
        "num_ctx": 2048,
    }
    answer = whole(hermes, messages=told, tools=[TOOL], options=options)
    assert answer["guided"]["ignored"] == ["num_ctx"]
    text = json.dumps(call["function"]["arguments"])
    calls = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "light", "arguments": text},
        }
        for number in range(2)
    ]
    messages = [
        *told[:2],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "?",
            "tool_calls": calls,
        },
        {
            "role": "tool",
            "name": "light",
            "content": "done",
            "tool_call_id": "call00000",
        },
        {
            "role": "tool",
            "name": "light",
            "content": "again",
            "tool_call_id": "call00001",
        },
    ]
    same = {
        "temperature": 0.5,
        "max_tokens": 12,
        "repetition_penalty": 1.2,
        "top_k": 9,
        "seed": 3,
    }
    chat = hermes.post(
        CHAT, json={"messages": messages, "tools": [TOOL], **same}
    ).json()
    assert answer["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert (answer["eval_count"], answer["done_reason"]) == (
        chat["usage"]["completion_tokens"],
        "length",
    )


def test_a_prompt_is_a_chat_of_one_message(client: TestClient) -> None:
    told = [{"role": "system", "content": "Be kind."}, *HI]
    options = {"temperature": 0, "num_predict": 9}
    prompted = whole(client, "/api/generate", system="Be kind.", options=options)
    chat = whole(client, messages=told, options=options)
    assert prompted["response"] == chat["message"]["content"]
    assert prompted["prompt_eval_count"] == chat["prompt_eval_count"]


def test_durations_are_nanoseconds_and_add_up(client: TestClient) -> None:
    answer = whole(client, format="json", options={"num_predict": 30})
    times = {name: answer[name] for name in TIMES}
    assert sum(times.values()) - 2 * times["total_duration"] == pytest.approx(0, abs=5)
    assert 1_000 < times["eval_duration"] < 60_000_000_000
    assert min(times.values()) >= 0


def test_num_predict_below_one_is_no_limit(client: TestClient) -> None:
    for number in (-1, -2, 0, 32_000):
        answer = whole(client, regex="[ab]{2000}", options={"num_predict": number})
        assert answer["prompt_eval_count"] + answer["eval_count"] == 512
        assert answer["done_reason"] == "length"


@pytest.mark.parametrize("given", ["json", {"type": "object"}, {}, json.dumps(LIGHT)])
def test_formats(client: TestClient, given: Any) -> None:
    """An empty schema is one too: any JSON value."""
    answer = whole(
        client, format=given, seed=4, complete=True, options={"num_predict": 60}
    )
    assert answer["guided"]["kind"] == (
        "json_object" if given == "json" else "json_schema"
    )
    value = json.loads(answer["message"]["content"])
    assert given == {} or isinstance(value, dict)
    in_options = whole(
        client, options={"format": given, "num_predict": 60}, seed=4, complete=True
    )
    assert in_options["message"] == answer["message"]
    for none in ("", None):
        assert whole(client, format=none, options={"num_predict": 3})["guided"] is None


def test_stop_strings_in_options(client: TestClient) -> None:
    options: dict[str, Any] = {"temperature": 0, "num_predict": 12}
    text = whole(client, options=options)["message"]["content"]
    stopped = whole(client, options={**options, "stop": [text[4:7]]})
    assert stopped["message"]["content"] == text[: text.index(text[4:7])]
    assert stopped["done_reason"] == "stop"


class TestThinking:
    def test_thoughts_have_their_field(
        self, thinking: Callable[[str], TestClient]
    ) -> None:
        thinker = thinking("<think>\n")
        asked: dict[str, Any] = {
            "format": LIGHT,
            "max_reasoning_tokens": 6,
            "think": "low",
            "seed": 3,
        }
        message = whole(thinker, **asked)["message"]
        assert message["thinking"]
        assert json.loads(message["content"]).keys() == {"color", "on"}
        assert flat(whole(thinker, "/api/generate", **asked))["thinking"]
        assert gathered(lines(thinker, **asked))["thinking"] == message["thinking"]

    def test_it_can_be_turned_off(self, thinking: Callable[[str], TestClient]) -> None:
        thinker = thinking(
            "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
        )
        answer = whole(thinker, format=LIGHT, think=False)
        assert "thinking" not in answer["message"]
        assert whole(thinker, think=True, options={"num_predict": 5})[
            "message"
        ].keys() > {"thinking"}

    def test_a_model_without_it_says_so(self, client: TestClient) -> None:
        assert whole(client, think=True, options={"num_predict": 3})["guided"][
            "ignored"
        ] == ["think"]


def test_models(client_with: Callable[..., TestClient]) -> None:
    client = client_with(tool_format="hermes", reasoning_format="think")
    [model] = client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"], len(model["digest"])) == ("tiny", "tiny", 64)
    assert model["details"] == {"family": "llama"}
    for name in ("model", "name"):  # the older field
        shown = client.post("/api/show", json={name: "tiny"}).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"] == {
            "general.architecture": "llama",
            "llama.context_length": 512,
        }
        assert "messages" in shown["template"]
    assert (
        "'x' does not exist"
        in client.post("/api/show", json={"model": "x"}).json()["error"]
    )
    assert client.get("/api/version").json() == client.get("/version").json()


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})],
)
def test_a_request_to_load_the_model(
    client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    answer = whole(client, path, **fields, keep_alive="5m")
    assert (answer["done_reason"], answer.get("response", "")) == ("load", "")


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (
            "/api/chat",
            {"messages": [{**HI[0], "images": ["aGk="]}]},
            "messages[0].images: images are not supported",
        ),
        ("/api/generate", {"images": ["aGk="]}, "images: images are not supported"),
        (
            "/api/generate",
            {"suffix": "x"},
            "suffix: the models served here don't fill in",
        ),
        ("/api/generate", {"context": [1]}, "Invalid 'context'"),
        ("/api/generate", {"template": "x"}, "Invalid 'template'"),
        ("/api/generate", {"raw": True}, "Invalid 'raw'"),
        ("/api/generate", {"messages": HI}, "'messages'; did you mean prompt?"),
        (
            "/api/chat",
            {"prompt_logprobs": 1},
            "prompt_logprobs: log-probabilities of prompts are not available here",
        ),
        (
            "/api/chat",
            {"options": {"num_predict": "5"}},
            "Invalid 'options.num_predict'",
        ),
        (
            "/api/generate",
            {"prompt": "word " * 700},
            "prompt: This model's maximum context length is 512 tokens",
        ),
        (
            "/api/chat",
            {"format": {"type": "strin"}},
            "format: 'strin' is not valid as 'type'",
        ),
        ("/api/chat", {"format": "yaml"}, "format: "),
        ("/api/chat", {"format": LIGHT, "regex": "a"}, "regex and format"),
        (
            "/api/chat",
            {
                "format": "json",
                "response_format": {"type": "json_schema", "schema": LIGHT},
            },
            "format",
        ),
        ("/api/chat", {"format": {}, "choice": ["a"]}, "choice and format"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature is -1"),
        ("/api/chat", {"options": {"num_predict": -3}}, "options.num_predict is -3"),
        ("/api/chat", {"top_logprobs": 3}, "top_logprobs requires logprobs: true"),
        ("/api/chat", {"json_shema": {}}, "did you mean json_schema"),
        ("/api/chat", {"n": 2}, "Invalid 'n'"),
        (
            "/api/chat",
            {"tools": [{**TOOL, "function": {"name": "a b"}}]},
            "Invalid 'tools[0].function.name'",
        ),
    ],
)
def test_refusals(
    hermes: TestClient, path: str, fields: dict[str, Any], says: str
) -> None:
    assert says in refusal(hermes, path, **fields)


def test_errors_are_ollamas(
    client_with: Callable[..., TestClient], failing: TestClient
) -> None:
    assert "'x' does not exist" in refusal(client_with(), model="x", status=404)
    assert "Incorrect API key" in refusal(client_with(api_key="sesame"), status=401)
    assert client_with().post("/api/pull", json={"model": "x"}).json().keys() == {
        "error"
    }
    found = post(
        failing, "/api/chat", model="guided-default", regex="[0-9]{30}"
    ).text.splitlines()
    *begun, last = map(json.loads, found)
    assert last.keys() == {"error"}
    assert "".join(line["message"]["content"] for line in begun).isdecimal()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/generate", {"content-type": "application/x-www-form-urlencoded"}, 200),
        ("/api/generate", {}, 200),
        (
            "/api/generate",
            {"content-type": "text/plain", "origin": "http://elsewhere.example"},
            400,
        ),
        ("/v1/completions", {"content-type": "text/plain"}, 400),
    ],
)
def test_bodies_need_no_type_where_no_page_can_send_them(
    client: TestClient, path: str, headers: dict[str, str], status: int
) -> None:
    body = json.dumps(
        {"model": "tiny", "prompt": "hi", "max_tokens": 2, "stream": False}
    )
    assert client.post(path, content=body, headers=headers).status_code == status
