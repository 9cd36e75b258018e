"""Fields that clients of other servers send: read, refused by name, or named in
`guided.ignored`, in all four APIs."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from serving import sse
from starlette.testclient import TestClient

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT, RESPONSES, ANTHROPIC = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
CHECK = "/v1/check"
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 60, "seed": 3},
    CHAT: {"messages": MESSAGES, "max_tokens": 60, "seed": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 60, "seed": 3},
    ANTHROPIC: {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 3},
    CHECK: {"messages": MESSAGES, "max_tokens": 60, "seed": 3},
}
ALL = [*ASKED]

DIGITS: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"enum": [4, 5]}},
    "required": ["n"],
}
A_DIGIT = r'\{\s*"n"\s*:\s*[45]\s*\}'
LIGHT = 'root ::= "on" | "off"'
TAG = {
    "type": "structural_tag",
    "format": {"type": "const_string", "value": "only this"},
}
GREEDY = {"temperature": 0}


def send(client: TestClient, path: str, **fields: Any) -> Any:
    return client.post(path, json={**ASKED[path], **fields})


def accepted(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = send(client, path, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refusal(client: TestClient, path: str, **fields: Any) -> tuple[str, str]:
    """Return the field at fault, and the message."""
    answer = send(client, path, **fields)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    return error.get("param") or error["details"]["param"], error["message"]


def text_of(path: str, body: dict[str, Any]) -> str:
    text: str
    match path:
        case "/v1/completions":
            text = body["choices"][0]["text"]
        case "/v1/chat/completions":
            text = body["choices"][0]["message"]["content"]
        case "/v1/responses":
            text = body["output"][0]["content"][0]["text"]
        case _:
            text = body["content"][0]["text"]
    return text


PLACES: list[tuple[dict[str, Any], str, str]] = [
    ({"ebnf": LIGHT}, "grammar", "on|off"),
    ({"sampling_params": {"ebnf": LIGHT, "min_p": 0.1, **GREEDY}}, "grammar", "on|off"),
    ({"sampling_params": {"regex": "[xy]{3}", "top_k": 4}}, "regex", "[xy]{3}"),
    ({"sampling_params": {"json_schema": json.dumps(DIGITS)}}, "json_schema", A_DIGIT),
    (
        {"sampling_params": {"structural_tag": json.dumps(TAG)}},
        "structural_tag",
        "only this",
    ),
    (
        {"nvext": {"guided_json": DIGITS, "guided_whitespace_pattern": ""}},
        "json_schema",
        r'\{"n":[45]\}',
    ),
    ({"nvext": {"guided_regex": "k[0-9]"}}, "regex", "k[0-9]"),
    (
        {"nvext": {"guided_choice": ["left", "right"], "repetition_penalty": 1.1}},
        "choice",
        "left|right",
    ),
    ({"nvext": {"guided_grammar": LIGHT}}, "grammar", "on|off"),
    (
        {"nvext": {"response_format": {"type": "json_schema", "schema": DIGITS}}},
        "json_schema",
        A_DIGIT,
    ),
    ({"nvext": {"structured_outputs": {"choice": ["up"]}}}, "choice", "up"),
    ({"response_format": {"type": "json", "value": DIGITS}}, "json_schema", A_DIGIT),
    (
        {"response_format": {"type": "json_object", "value": json.dumps(DIGITS)}},
        "json_schema",
        A_DIGIT,
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "name": "d",
                "schema": DIGITS,
                "strict": True,
            }
        },
        *("json_schema", A_DIGIT),
    ),
    # Equal constraints count once.
    ({"regex": "p{2}", "guided_regex": "p{2}"}, "regex", "pp"),
    (
        {
            "guided_grammar": LIGHT,
            "structured_outputs": {"grammar": LIGHT},
            "ebnf": LIGHT,
        },
        "grammar",
        "on|off",
    ),
    (
        {
            "json_schema": json.dumps(DIGITS),
            "response_format": {"type": "json", "value": DIGITS, "schema": DIGITS},
        },
        *("json_schema", A_DIGIT),
    ),
    ({"choice": ["q", "q"], "nvext": {"guided_choice": ["q"]}}, "choice", "q"),
    ({"structural_tag": TAG, "response_format": TAG}, "structural_tag", "only this"),
]


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(("fields", "kind", "pattern"), PLACES)
def test_each_place_constrains(
    client: TestClient, path: str, fields: dict[str, Any], kind: str, pattern: str
) -> None:
    body = accepted(client, path, **fields)
    assert body["guided"]["kind"] == kind
    assert "ignored" not in body["guided"]
    if path != CHECK:
        assert re.fullmatch(pattern, text_of(path, body))


@pytest.mark.parametrize("path", ALL)
def test_json_object_in_two_fields(client: TestClient, path: str) -> None:
    both = {
        "json_object": True,
        "response_format": {"type": "json_object"},
        "sampling_params": {"json_object": True},
    }
    assert accepted(client, path, **both)["guided"]["kind"] == "json_object"


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("fields", "param", "both"),
    [
        ({"regex": "a", "ebnf": LIGHT}, "ebnf", "regex and ebnf"),
        (
            {"regex": "a", "nvext": {"guided_regex": "b"}},
            "nvext.guided_regex",
            "regex and nvext.guided_regex",
        ),
        (
            {
                "response_format": {
                    "type": "json",
                    "schema": DIGITS,
                    "value": {"enum": [1]},
                }
            },
            *(
                "response_format.value",
                "response_format.schema and response_format.value",
            ),
        ),
        ({"sampling_params": {"regex": "(", "n": 1}}, "sampling_params.regex", "regex"),
        ({"sampling_params": {"min_p": 7}}, "sampling_params.min_p", "min_p is 7"),
        ({"sampling_params": {"top_k": "7"}}, "sampling_params.top_k", "top_k"),
    ],
)
def test_errors_name_the_place(
    client: TestClient, path: str, fields: dict[str, Any], param: str, both: str
) -> None:
    field, message = refusal(client, path, **fields)
    assert field == param
    assert both in message


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            ("guided_json_object", "json_object"),
            ("response_schema", "json_schema"),
            ("responseSchema", "json_schema"),
        ),
        *(
            ("gbnf", "grammar"),
            ("lark", "grammar"),
            ("pattern", "regex"),
            ("output_type", "response_format"),
        ),
        *(
            ("json", "json_schema"),
            ("json_schema_str", "json_schema"),
            ("guided_json_schema", "json_schema"),
        ),
        *(
            ("regex_pattern", "regex"),
            ("grammar_ebnf", "grammar"),
            ("response_json_schema", "json_schema"),
        ),
        *(
            ("json_mode", "json_schema"),
            ("outputSchema", "json_schema"),
            ("guided_enum", "structured_outputs"),
        ),
        *(
            ("constrained_decoding", "structured_outputs"),
            ("response_mime_type", "response_format"),
        ),
        *(
            ("structuredOutputs", "structured_outputs"),
            ("x" * 45 + "_schema", "json_schema"),
        ),
        *(
            ("text_format", "response_format"),
            ("lark_grammar", "grammar"),
            ("valid_choices", "choice"),
        ),
    ],
)
def test_names_that_mean_a_constraint(
    client: TestClient, path: str, name: str, meant: str
) -> None:
    for place in (
        "",
        "nvext",
        "sampling_params",
        "extra_body",
        "generationConfig",
        "vllm_xargs",
    ):
        value: Any = "x"
        field, message = refusal(
            client, path, **({place: {name: value}} if place else {name: value})
        )
        whole = place in ("extra_body", "vllm_xargs")
        assert field == (place if whole else f"{place}.{name}" if place else name)
        assert (
            f"did you mean {'its fields' if place == 'extra_body' else meant}"
            in message
        )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["output_format", "output_config", "text"])
def test_fields_of_other_apis_that_constrain(
    client: TestClient, path: str, name: str
) -> None:
    field, message = refusal(
        client, path, **{name: {"type": "json_schema", "schema": DIGITS}}
    )
    assert (field, "did you mean response_format" in message) == (name, True)


@pytest.mark.parametrize(
    ("path", "fields", "param", "meant"),
    [
        (
            RESPONSES,
            {"text": {"type": "json_schema", "schema": DIGITS}},
            "text.type",
            "text.format",
        ),
        (
            RESPONSES,
            {"text": {"schema": DIGITS, "verbosity": "low"}},
            "text.schema",
            "text.format",
        ),
        (
            RESPONSES,
            {"text": {"json_schema": DIGITS}},
            "text.json_schema",
            "text.format",
        ),
        (
            ANTHROPIC,
            {"output_config": {"type": "json_schema"}},
            "output_config.type",
            "output_config.format",
        ),
        (
            ANTHROPIC,
            {"output_config": {"effort": "low", "regex": "a"}},
            "output_config.regex",
            "output_config.format",
        ),
        (
            CHAT,
            {"structured_outputs": {"json_schema": DIGITS}},
            "structured_outputs.json_schema",
            "json",
        ),
        (
            CHAT,
            {"structured_outputs": {"pattern": "a"}},
            "structured_outputs.pattern",
            "regex",
        ),
        (
            CHAT,
            {"structured_outputs": {"ebnf": LIGHT}},
            "structured_outputs.ebnf",
            "grammar",
        ),
        (
            CHECK,
            {"response_format": {"type": "json", "jsonSchema": {}}},
            "response_format.jsonSchema",
            "json_schema",
        ),
        (
            CHECK,
            {"response_format": {"type": "regex", "pattern": "a"}},
            "response_format.pattern",
            "regex",
        ),
        (
            CHAT,
            {"response_format": {"type": "object", "properties": {}}},
            "response_format.properties",
            "schema",
        ),
        (
            *(
                CHAT,
                {"response_format": {"type": "json_schema", "json_schema": DIGITS}},
            ),
            *("response_format.json_schema.type", "schema"),
        ),
        (
            RESPONSES,
            {"text": {"formatting": {"type": "json_object"}}},
            "text.formatting",
            "text.format",
        ),
        (
            COMPLETIONS,
            {"body": [{"sampling": {"guided_choice": ["a"]}}]},
            "body.sampling.guided_choice",
            "guided_choice",
        ),
        (CHAT, {"answer_shape": DIGITS}, "answer_shape", "response_format"),
        (
            ANTHROPIC,
            {"reply": {"format": {"type": "json_object"}}},
            "reply.format",
            "response_format",
        ),
        (
            RESPONSES,
            {"runtime": {"nvext": {"guided_grammar": "x"}}},
            "runtime.nvext.guided_grammar",
            "guided_grammar",
        ),
        (
            CHAT,
            {"vllm_xargs": {"guided_json": DIGITS}},
            "vllm_xargs",
            "guided_json, beside vllm_xargs",
        ),
        (
            *(
                CHAT,
                {
                    "tools": [
                        {
                            "type": "function",
                            "function": {"name": "f", "inputSchema": DIGITS},
                        }
                    ]
                },
            ),
            *("tools[0].function.inputSchema", "parameters"),
        ),
    ],
)
def test_names_within_objects(
    client: TestClient, path: str, fields: dict[str, Any], param: str, meant: str
) -> None:
    field, message = refusal(client, path, **fields)
    assert field == param
    assert f"did you mean {meant}?" in message


HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"schema": "v1"},
    "store": True,
    "truncation": "disabled",
    "cache_salt": "s",
    "priority": 3,
    "request_id": "r",
    "thinking_token_budget": 7,
    "max_tool_calls": 2,
    "reasoning_format": "deepseek",
    "keep_alive": 1,
    "options": {"num_ctx": 1},
    "provider": {"order": ["a"], "sort": {"type": "price", "properties": {"a": {}}}},
    "trace": [{"input": "x", "text": {"format": "mp3"}, "temperature": 0}],
    "separate_reasoning": True,
}


@pytest.mark.parametrize("path", ALL)
def test_harmless_fields_are_named(client: TestClient, path: str) -> None:
    body = accepted(
        client,
        path,
        **HARMLESS,
        regex="a",
        nvext={"annotations": ["x"], "max_thinking_tokens": 5},
    )
    assert body["guided"]["ignored"] == [
        *HARMLESS,
        "nvext.annotations",
        "nvext.max_thinking_tokens",
    ]
    many = {f"unknown{number}": 1 for number in range(30)}
    field, _ = refusal(client, path, **many, guided_thing="a")
    assert field == "guided_thing", "it is found behind many unknown fields"


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    "fields",
    [{"seed": None}, {"unheard_of": 1}, {"nvext": {"choice": None, "unheard_of": 1}}],
)
def test_the_description_allows_what_is_ignored(
    client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    description = client.get("/openapi.json").json()
    schema = description["paths"][path]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    body = {**ASKED[path], **fields}
    assert jsonschema_rs.is_valid({**description, **schema}, body)
    assert not jsonschema_rs.is_valid({**description, **schema}, {**body, "n": "three"})
    accepted(client, path, **fields)


def test_a_name_that_is_no_unicode(client: TestClient) -> None:
    raw = json.dumps({**ASKED[CHAT], "\ud800 schema": 1})
    error = client.post(
        CHAT, content=raw, headers={"content-type": "application/json"}
    ).json()["error"]
    assert (
        error["message"]
        == "Unknown parameter: '\\ud800 schema'; did you mean json_schema?"
    )


@pytest.mark.parametrize(
    ("path", "fields", "here"),
    [
        *(
            (RESPONSES, {name: 5}, "max_output_tokens")
            for name in ("max_tokens", "max_completion_tokens")
        ),
        *(
            (RESPONSES, {"prompt": {"id": "p"}}, "input"),
            (RESPONSES, {"messages": MESSAGES}, "input"),
        ),
        *(
            (ANTHROPIC, {name: 5}, "max_tokens")
            for name in ("max_completion_tokens", "max_output_tokens")
        ),
        *(
            (path, {"stop_sequences": ["x"]}, "stop")
            for path in (COMPLETIONS, CHAT, RESPONSES, CHECK)
        ),
        *(
            (CHAT, {"max_output_tokens": 5}, "max_tokens"),
            (CHAT, {"system": "Be kind."}, "messages"),
        ),
        *(
            (COMPLETIONS, {"max_new_tokens": 5}, "max_tokens"),
            (ANTHROPIC, {"instructions": "x"}, "system"),
        ),
        *(
            (ANTHROPIC, {"max_tokens_to_sample": 5}, "max_tokens"),
            (CHAT, {"toolChoice": "required"}, "tool_choice"),
        ),
        *(
            (RESPONSES, {"systemInstruction": "x"}, "instructions"),
            (COMPLETIONS, {"maxTokens": 5}, "max_tokens"),
        ),
    ],
)
def test_names_of_other_apis(
    client: TestClient, path: str, fields: dict[str, Any], here: str
) -> None:
    field, message = refusal(client, path, **fields)
    assert [field] == [*fields]
    assert f"did you mean {here}?" in message


@pytest.mark.parametrize("path", ALL)
def test_what_is_harmless_is_accepted(client: TestClient, path: str) -> None:
    outputs = {"regex": "[ab]", "disable_fallback": True}
    body = accepted(
        client,
        path,
        structured_outputs=outputs,
        guided_decoding_backend="xgrammar:no-fallback",
    )
    assert body["guided"]["ignored"] == ["structured_outputs.disable_fallback"]
    assert body["guided"]["backend"] == "xgrammar"
    accepted(client, path, top_p=0, stream=None, skip_special_tokens=None)
    unnamed = {"type": "json_schema", "json_schema": {"schema": DIGITS}}
    assert (
        accepted(client, path, response_format=unnamed)["guided"]["kind"]
        == "json_schema"
    )
    closed = {
        "json_schema": DIGITS,
        "open_objects": True,
        "backend": "auto:no-fallback,no-additional-properties",
    }
    assert accepted(client, path, **closed)["guided"]["closed"] == [""]


def test_no_limit_and_no_alternatives(client: TestClient) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = accepted(
            client,
            CHAT,
            **{"max_tokens": None, name: -1},
            regex="[ab]{70}",
            top_p=0,
            seed=1,
        )
        assert len(text_of(CHAT, body)) == 70
        assert text_of(CHAT, body) == text_of(
            CHAT, accepted(client, CHAT, max_tokens=90, regex="[ab]{70}", **GREEDY)
        )
    assert (
        accepted(client, COMPLETIONS, max_tokens=-1, ignore_eos=True)["usage"][
            "completion_tokens"
        ]
        == 16
    )
    assert (
        len(
            text_of(
                RESPONSES,
                accepted(client, RESPONSES, max_output_tokens=-1, regex="[ab]{70}"),
            )
        )
        == 70
    )


@pytest.mark.parametrize(
    ("path", "limit"), [(CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")]
)
def test_limits_in_other_places(client: TestClient, path: str, limit: str) -> None:
    for place, name in (
        ("sampling_params", "max_new_tokens"),
        ("nvext", "max_tokens"),
        ("nvext", limit),
    ):
        short = accepted(
            client, path, **{limit: None, place: {name: 3}}, regex="[ab]{70}"
        )
        assert (
            short["usage"].get("completion_tokens") or short["usage"]["output_tokens"]
        ) == 3
        both = accepted(client, path, **{place: {name: 3}}, regex="[ab]{9}")
        assert (len(text_of(path, both)), both["guided"]["ignored"]) == (
            9,
            [f"{place}.{name}"],
        )


def test_efforts_reach_the_template(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = client.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    monkeypatch.setattr(
        tokenizer, "chat_template", "{{ reasoning_effort }}{{ messages[0]['content'] }}"
    )
    flat = accepted(client, CHECK, reasoning_effort="high")["prompt_tokens"]
    body = accepted(client, CHECK, reasoning={"effort": "high", "exclude": True})
    assert body["prompt_tokens"] == flat > accepted(client, CHECK)["prompt_tokens"]
    assert body["guided"]["ignored"] == ["exclude"]


def test_tokenize_counts_as_a_chat(
    hermes: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = hermes.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    written = "{{ tools }}{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        written + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    tool = {"type": "function", "function": {"name": "roll", "parameters": DIGITS}}
    for fields in (
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none"},
        {"functions": [tool["function"]]},
        {"add_generation_prompt": False},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "So"}],
            "continue_final_message": True,
        },
    ):
        chat = hermes.post(CHECK, json={"messages": MESSAGES, **fields}).json()[
            "prompt_tokens"
        ]
        counted = hermes.post("/tokenize", json={"messages": MESSAGES, **fields}).json()
        assert (counted["count"], counted["guided"]) == (chat, None)
    continued = hermes.post(
        "/tokenize", json={"messages": MESSAGES, "continue_final_message": True}
    ).json()["tokens"]
    assert tokenizer.decode(continued).endswith("hi")
    named = hermes.post(
        "/tokenize", json={"prompt": "a", "add_bos": True, "user": "u"}
    ).json()["guided"]
    assert named == {"ignored": ["add_bos", "user"]}


def test_input_tokens_of_responses(hermes: TestClient) -> None:
    asked = {
        "input": "hi there",
        "instructions": "Be kind.",
        "tools": [{"type": "function", "name": "f"}],
    }
    counted = hermes.post(f"{RESPONSES}/input_tokens", json=asked).json()
    usage = hermes.post(RESPONSES, json={**asked, "max_output_tokens": 2}).json()[
        "usage"
    ]
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": usage["input_tokens"],
    }


def test_prompt_logprobs(client: TestClient) -> None:
    prompt = client.post("/tokenize", json={"prompt": "hi there"}).json()["tokens"]
    body = accepted(
        client, COMPLETIONS, prompt=["hi there", "x"], prompt_logprobs=0, max_tokens=1
    )
    first, second = (choice["prompt_logprobs"] for choice in body["choices"])
    assert (first[0], second[0]) == (None, None)
    assert [[int(token) for token in row] for row in first[1:]] == [
        [token] for token in prompt[1:]
    ]
    of_chat = accepted(client, CHAT, prompt_logprobs=2, max_tokens=1)["prompt_logprobs"]
    assert all(2 <= len(row) <= 3 for row in of_chat[1:])
    assert {row["rank"] for row in of_chat[1].values()} >= {1, 2}
    for path in (COMPLETIONS, CHAT):
        assert (
            refusal(client, path, prompt_logprobs=0, stream=True)[0]
            == "prompt_logprobs"
        )
    for path in (RESPONSES, ANTHROPIC):
        assert refusal(client, path, prompt_logprobs=0)[0] == "prompt_logprobs"
    limited = refusal(
        client, COMPLETIONS, prompt=["a " * 500] * 40, prompt_logprobs=20, max_tokens=1
    )
    assert limited[0] == "prompt_logprobs"


@pytest.mark.parametrize("path", ALL)
def test_stream_options_need_a_stream(client: TestClient, path: str) -> None:
    assert (
        refusal(client, path, stream_options={"include_usage": True})[0]
        == "stream_options"
    )
    assert (
        send(
            client, path, stream=True, stream_options={"include_usage": True}
        ).status_code
        == 200
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_in_each_chunk(client: TestClient, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = sse(
        send(
            client, path, regex="[ab]{9}", n=2, stream=True, stream_options=options
        ).text
    )
    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert (
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        )
        counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(
        numbers == sorted(numbers) and len(set(numbers)) > 2
        for numbers in counts.values()
    )
    assert (
        sum(numbers[-1] for numbers in counts.values())
        == last["usage"]["completion_tokens"]
    )
    rare = sse(
        send(
            client,
            path,
            regex="a",
            stream=True,
            stream_options={"continuous_usage_stats": True},
        ).text
    )
    assert all("usage" not in chunk for chunk in rare[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_are_returned(client: TestClient, path: str) -> None:
    asked = {"regex": "[ab]{9}", "seed": 5, "return_token_ids": True}
    whole = accepted(client, path, **asked)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    prompt = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    chunks = sse(send(client, path, **asked, stream=True).text)[:-1]
    assert [
        token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])
    ] == ids
    assert (chunks[0] if path == CHAT else chunks[0]["choices"][0])[
        "prompt_token_ids"
    ] == prompt
    for other in (RESPONSES, ANTHROPIC):
        body = accepted(
            client, other, return_token_ids=True, return_tokens_as_token_ids=True
        )
        assert body["guided"]["ignored"] == [
            "return_token_ids",
            "return_tokens_as_token_ids",
        ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_are_written_as_ids(client: TestClient, path: str) -> None:
    wanted = (
        {"logprobs": 2}
        if path == COMPLETIONS
        else {"logprobs": True, "top_logprobs": 2}
    )
    asked = {
        "regex": "[ab]{3}",
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **wanted,
    }
    [choice] = accepted(client, path, **asked)["choices"]
    found = choice["logprobs"]
    tokens = (
        found["tokens"]
        if path == COMPLETIONS
        else [each["token"] for each in found["content"]]
    )
    assert tokens == [f"token_id:{token}" for token in choice["token_ids"][:-1]]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (RESPONSES, "text.format"),
        (ANTHROPIC, "output_config.format"),
        (CHAT, "response_format"),
    ],
)
def test_two_constraints_are_named_as_they_were_sent(
    client: TestClient, path: str, field: str
) -> None:
    sent: Any = {"type": "json_schema", "name": "n", "schema": DIGITS}
    if path == CHAT:
        sent = {"type": "json_schema", "json_schema": {"name": "n", "schema": DIGITS}}
    for name in reversed(field.split(".")):
        sent = {name: sent}
    _, message = refusal(client, path, guided_regex="a", **sent)
    assert field in message
    assert ("response_format" in message) == (path == CHAT)
