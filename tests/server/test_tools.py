"""Function calls in chats: what is offered, what is enforced, what the answer looks
like, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion
from serving import sse
from starlette.testclient import TestClient

from guided.tools.formats import TOOL_FORMATS, ToolFormat

CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 150}
DICE = {
    "type": "object",
    "properties": {"sides": {"enum": [4, 6, 20]}, "loud": {"type": "boolean"}},
    "required": ["sides", "loud"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"does {name}", **fields}
    return {
        "type": "function",
        "function": function
        if parameters is None
        else {**function, "parameters": parameters},
    }


WRONG = {"type": "object", "properties": {"a": {"type": "strin"}}}
TOOLS = [
    tool("roll_dice", {**DICE}),
    tool("get_weather", {**CITY, "additionalProperties": False}),
]
SCHEMAS: dict[str, Any] = {"roll_dice": DICE, "get_weather": CITY}


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json={**USER, "tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json={**USER, "tools": TOOLS, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and arguments of each call. They validate."""
    found = []
    for call in message["tool_calls"]:
        name, arguments = (
            call["function"]["name"],
            json.loads(call["function"]["arguments"]),
        )
        jsonschema.validate(arguments, SCHEMAS[name])
        found.append((name, arguments))
    return found


ALLOWED = {
    "mode": "required",
    "tools": [{"type": "function", "function": {"name": "roll_dice"}}],
}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"roll_dice", "get_weather"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "name": "get_weather"}, {"get_weather"}),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, {"roll_dice"}),
        ({"type": "allowed_tools", **ALLOWED}, {"roll_dice"}),
    ],
)
def test_a_choice_is_one_call_of_these(
    hermes: TestClient, choice: Any, names: set[str]
) -> None:
    body = ask(hermes, tool_choice=choice, parallel_tool_calls=False)
    [answer] = body["choices"]
    [(name, _)] = calls_of(answer["message"])
    assert name in names
    assert (answer["message"]["content"], answer["finish_reason"]) == (
        None,
        "tool_calls",
    )
    assert body["guided"] == {
        "kind": "tools",
        "backend": "llguidance",
        "not_enforced": [],
    }
    assert re.fullmatch("call_[0-9a-f]{24}", answer["message"]["tool_calls"][0]["id"])


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_auto_guards_calls_from_the_trigger_on(
    hermes: TestClient, backend: str
) -> None:
    """The model is random, so a bias makes it begin a call."""
    tokenizer = hermes.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    fields = {
        "logit_bias": {str(tokenizer.encode("<", add_special_tokens=False)[0]): 100},
        "backend": backend,
    }
    text = ask(hermes, **fields, max_tokens=30)["choices"][0]
    assert text["finish_reason"] == "length"
    assert set(text["message"]["content"]) == {"<"}
    # Beside another constraint, calls stand at the beginning: the answer is no call,
    # whatever it contains.
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": ["<tool_call>"]}},
    }
    choice = ask(hermes, response_format=form, backend=backend, max_tokens=300)[
        "choices"
    ][0]
    if not choice["message"].get("tool_calls"):
        assert (choice["message"]["content"], choice["finish_reason"]) == (
            '"<tool_call>"',
            "stop",
        )


def test_streams_are_the_answer_in_pieces(hermes: TestClient) -> None:
    fields = {"tool_choice": "required", "seed": 5, "n": 2}
    whole = ask(hermes, **fields)["choices"]
    answer = hermes.post(CHAT, json={**USER, "tools": TOOLS, **fields, "stream": True})
    assert answer.status_code == 200
    events = sse(answer.text)
    assert events.pop() == "[DONE]"
    built: list[list[dict[str, str]]] = [[], []]
    deltas = [
        (choice["index"], delta)
        for event in events
        for choice in event["choices"]
        for delta in choice["delta"].get("tool_calls", [])
    ]
    for index, delta in deltas:
        if "id" in delta:
            built[index].append({"name": delta["function"]["name"], "arguments": ""})
        built[index][delta["index"]]["arguments"] += delta["function"]["arguments"]
    for choice, calls in zip(whole, built, strict=True):
        expected = [
            (c["function"]["name"], c["function"]["arguments"])
            for c in choice["message"]["tool_calls"]
        ]
        assert [(call["name"], call["arguments"]) for call in calls] == expected
    assert len(deltas) > 8
    reasons = {
        choice["finish_reason"] for event in events[-2:] for choice in event["choices"]
    }
    assert reasons <= {None, "tool_calls", "length"}


@pytest.mark.parametrize("name", ["gemma_4", "llama_4"])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "roll_dice"}}, "auto"],
)
def test_lists_of_arguments(
    client_with: Callable[..., TestClient], name: str, choice: Any
) -> None:
    """Gemma's and Llama 4's calls, whole and streamed. With "auto", a bias makes the
    model begin one."""
    client = client_with(tool_format=name)
    tokenizer = client.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    trigger = tokenizer.encode(TOOL_FORMATS[name].trigger, add_special_tokens=False)
    bias = {str(token): 100 for token in trigger} if choice == "auto" else {}
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "logit_bias": bias}
    message = ask(client, **fields, max_tokens=300)["choices"][0]["message"]
    if choice == "auto" and name == "gemma_4":  # a bias does not write its trigger
        assert not message.get("tool_calls")
        return
    [(called, arguments)] = calls_of(message)
    assert message["content"] is None
    assert called == "roll_dice" or choice in ("required", "auto")
    answer = client.post(
        CHAT, json={**USER, "tools": TOOLS, **fields, "max_tokens": 300, "stream": True}
    )
    choices = [part for event in sse(answer.text)[:-1] for part in event["choices"]]
    deltas = [
        delta for part in choices for delta in part["delta"].get("tool_calls", [])
    ]
    assert (
        json.loads("".join(delta["function"].get("arguments", "") for delta in deltas))
        == arguments
    )
    assert choices[-1]["finish_reason"] == "tool_calls"


ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


@pytest.mark.parametrize("strict", [{"strict": False}, {"strict": True}, {}])
def test_arguments_are_enforced_with_any_strict(
    hermes: TestClient, strict: dict[str, Any]
) -> None:
    body = ask(hermes, tools=[tool("roll_dice", DICE, **strict)], **ONE)
    assert len(calls_of(body["choices"][0]["message"])) == 1
    assert body["guided"]["not_enforced"] == []


def test_a_function_without_parameters_has_no_arguments(hermes: TestClient) -> None:
    [choice] = ask(hermes, tools=[tool("f")], **ONE)["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_tool_strict_off_is_vllms_meaning_of_strict(
    client_with: Callable[..., TestClient],
) -> None:
    client = client_with(tool_format="hermes", tool_strict="off")
    loose = tool(
        "f", {"type": "object", "minProperties": 1, "required": ["x"]}, strict=False
    )
    body = ask(
        client,
        tools=[*TOOLS, loose],
        tool_choice={"type": "function", "name": "f"},
        temperature=0,
    )
    assert body["guided"]["not_enforced"] == ["tools[2].function.parameters"]
    assert "checked" not in body["guided"]


BESIDE = {"b": {"enum": ["x"]}}
"""A property that stays enforced beside those at fault."""


def odd(name: str, part: Any, **fields: Any) -> dict[str, Any]:
    properties = {
        "properties": {"a": part, **BESIDE},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    return tool(name, {"type": "object", **properties}, **fields)


ODD = [
    odd("remote", {"$ref": "https://example.org/schema"}),
    odd("draft3", {"type": "any", "required": True}, strict=False),
    odd("number", {"type": "float"}),
    odd("bare", "string"),
    odd("tuple", {"type": "array", "items": [{"type": "string"}], "prefixItems": [{}]}),
    odd("item", {"type": "array", "items": {"type": "STRING"}}),
    odd("values", {"type": "array", "items": {"type": "string"}, "enum": ["u", "v"]}),
    odd("digits", {"type": "integer", "enum": ["1", "2"]}),
    odd("pattern", {"type": "string", "pattern": "[a"}),
    odd("never", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    odd("negation", {"not": {"type": "nothing"}}),
    tool("array", {"type": "array"}),
]
"""Functions with schemas that can't be enforced. Patterns and `allOf` are found when
they are compiled."""
FREE = ["/properties/a"] * 5 + ["/properties/a/items"] + ["/properties/a"] * 5 + [""]


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_subschema_at_fault_is_free(hermes: TestClient, stream: bool) -> None:
    tools = [*TOOLS, *ODD, tool("get_time", CITY)]
    answer = hermes.post(
        CHAT, json={**USER, "tools": tools, "max_tokens": 3, "stream": stream}
    )
    assert answer.status_code == 200, answer.text
    guided = sse(answer.text)[0]["guided"] if stream else answer.json()["guided"]
    assert guided["not_enforced"] == [
        f"tools[{index}].function.parameters{at}" for index, at in enumerate(FREE, 2)
    ]
    checked = hermes.post("/v1/check", json={**USER, "tools": tools}).json()
    assert checked["guided"]["not_enforced"] == guided["not_enforced"]
    # The rest of them is enforced, and so are the others.
    for name in ("roll_dice", "digits", "pattern"):
        fields = {"tool_choice": {"type": "function", "name": name}}
        [choice] = ask(hermes, tools=tools, **fields, max_tokens=300)["choices"]
        [call] = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(
            arguments,
            DICE if name == "roll_dice" else {"properties": BESIDE, "required": ["b"]},
        )


def test_faults_found_one_by_one_are_bounded(hermes: TestClient) -> None:
    tools = [
        odd(f"f{index}", {"type": "string", "pattern": "(" * (index + 1)})
        for index in range(20)
    ]
    guided = ask(hermes, tools=tools, max_tokens=3)["guided"]
    assert guided["not_enforced"] == [
        f"tools[{index}].function.parameters" for index in range(20)
    ]


def test_elements_drop_only_the_argument_at_fault(
    client_with: Callable[..., TestClient],
) -> None:
    """In this format an object's properties are elements, which have no counts."""
    client = client_with(tool_format="cohere")
    tools = [
        odd("f", {"type": "object", "minProperties": 1}),
        tool("get_weather", CITY),
    ]
    guided = client.post("/v1/check", json={**USER, "tools": tools}).json()["guided"]
    assert guided["not_enforced"] == ["tools[0].function.parameters/properties/a"]
    name = odd("f", {"type": "object", "properties": {"<": {"type": "null"}}})
    guided = client.post("/v1/check", json={**USER, "tools": [name]}).json()["guided"]
    assert guided["not_enforced"] == ["tools[0].function.parameters/properties/a"]


@pytest.mark.parametrize("kind", [["object"], ["object", "null"], "dict", "OBJECT"])
def test_arguments_are_an_object_however_spelled(hermes: TestClient, kind: Any) -> None:
    named = tool("roll_dice", {**DICE, "type": kind})
    body = ask(hermes, tools=[named], **ONE)
    assert len(calls_of(body["choices"][0]["message"])) == 1
    assert body["guided"]["not_enforced"] == []
    named["function"]["strict"] = True
    status = hermes.post("/v1/check", json={**USER, "tools": [named]}).status_code
    assert status == (200 if isinstance(kind, list) else 400)


@pytest.mark.parametrize("index", range(len(ODD)))
def test_a_strict_function_needs_a_schema_that_can_be_enforced(
    hermes: TestClient, index: int
) -> None:
    function = {**ODD[index]["function"], "strict": True}
    assert (
        refusal(hermes, tools=[{"type": "function", "function": function}])["param"]
        == "tools[0].function.parameters"
    )
    assert (
        refusal(hermes, tools=[ODD[index]], strict_schema=True)["param"]
        == "tools[0].function.parameters"
    )


def test_a_stop_string_ends_text_and_no_call(hermes: TestClient) -> None:
    text = ask(hermes, max_tokens=30)["choices"][0]["message"]["content"]
    [choice] = ask(hermes, max_tokens=30, stop=[text[5:8]])["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (
        text[: text.index(text[5:8])],
        text[5:8],
    )
    [call] = calls_of(ask(hermes, **ONE)["choices"][0]["message"])
    [choice] = ask(hermes, **ONE, stop=['"', "}", "\n", "tool_call"])["choices"]
    assert calls_of(choice["message"]) == [call]
    assert choice["finish_reason"] == "tool_calls"


def custom(name: str, form: Any = None) -> dict[str, Any]:
    return {
        "type": "custom",
        "custom": {
            "name": name,
            "description": f"does {name}",
            **({"format": form} if form else {}),
        },
    }


SUM = 'start: term ("+" term)+\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]?/\n'
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": SUM}}
CODE = {
    "type": "grammar",
    "grammar": {"syntax": "regex", "definition": r"[A-Z]{2}\n\"[0-9]{3}\""},
}


@pytest.mark.parametrize(
    ("form", "expected"),
    [(LARK, r"[1-9(][0-9+()]*"), (CODE, r'[A-Z]{2}\n"[0-9]{3}"'), (None, r"(?s).*")],
)
def test_a_custom_tool_gets_a_text(
    hermes: TestClient, form: Any, expected: str
) -> None:
    fields = {
        "tools": [*TOOLS, custom("calc", form)],
        "tool_choice": {"type": "custom", "custom": {"name": "calc"}},
        "max_tokens": 100,
        "complete": True,
    }
    body = ask(hermes, **fields)
    [choice] = body["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"], choice["finish_reason"]) == (
        "custom",
        "calc",
        "tool_calls",
    )
    text = call["custom"]["input"]
    assert re.fullmatch(expected, text)
    if form is LARK:
        assert eval(text) > 1
    ChatCompletion.model_validate(body)
    events = sse(hermes.post(CHAT, json={**USER, **fields, "stream": True}).text)[:-1]
    deltas = [
        delta
        for event in events
        for delta in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [delta["custom"]["name"] for delta in deltas if "id" in delta] == ["calc"]
    assert "".join(delta["custom"]["input"] for delta in deltas) == text


def test_lark_is_refused_where_text_follows_it(
    client_with: Callable[..., TestClient],
) -> None:
    error = refusal(
        client_with(tool_format="mistral"), tools=[*TOOLS, custom("calc", LARK)]
    )
    assert error["param"] == "tools[2].custom.format"
    assert "use a regex" in error["message"]


def test_the_grammar_of_codex_is_accepted(hermes: TestClient) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}}
    answer = hermes.post(
        "/v1/check", json={**USER, "tools": [*TOOLS, custom("apply_patch", form)]}
    )
    assert answer.status_code == 200, answer.text


APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def test_the_former_fields_of_functions(hermes: TestClient) -> None:
    functions = [each["function"] for each in TOOLS]
    fields: dict[str, Any] = {
        "functions": functions,
        "function_call": {"name": "get_weather"},
    }
    asked = {**USER, **fields}
    body = hermes.post(CHAT, json=asked).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    call = choice["message"]["function_call"]
    jsonschema.validate(json.loads(call["arguments"]), CITY)
    assert call["name"] == "get_weather"
    ChatCompletion.model_validate(body)
    events = sse(hermes.post(CHAT, json={**asked, "stream": True}).text)[:-1]
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["get_weather"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == call["arguments"]
    wrong = {**functions[0], "parameters": WRONG, "strict": True}
    error = hermes.post(CHAT, json={**USER, "functions": [wrong]}).json()["error"]
    assert (error["param"], error["pointer"]) == (
        "functions[0].parameters",
        "/properties/a/type",
    )


def test_keywords_that_masks_do_not_enforce_are_named(hermes: TestClient) -> None:
    fields = ONE
    properties = {
        "a": {"type": "array", "uniqueItems": True},
        "b": {"type": "string", "format": "color"},
    }
    guided = ask(
        hermes,
        tools=[*TOOLS, tool("f", {"properties": properties})],
        max_tokens=2,
        **fields,
    )["guided"]
    assert guided["checked"] == [
        "tools[2].function.parameters/properties/a/uniqueItems"
    ]
    assert guided["not_enforced"] == [
        "tools[2].function.parameters/properties/b/format"
    ]
    never = {
        "properties": {"a": {"type": "string", "maxLength": 1, "pattern": "b(?=b)"}},
        "required": ["a"],
    }
    answer = hermes.post(
        CHAT,
        json={
            **USER,
            "tools": [tool("f", {**never, "additionalProperties": False})],
            **fields,
        },
    )
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (
        "constraint_not_met",
        "tools[0].function.parameters",
    )
    assert error["pointer"] == "/properties/a/pattern"


def test_a_format_with_special_tokens(
    client_with: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens begin calls, as Mistral's do. They are not part of the answer."""
    form = ToolFormat(
        call=("<|system|>{name}<|user|>", ""),
        trigger="<|system|>",
        marks=("?",),
        gap="",
        id_length=9,
    )
    monkeypatch.setitem(TOOL_FORMATS, "special", form)
    client = client_with(tool_format="special")
    tokenizer = client.app.state.context.llm.tokenizer  # type: ignore[attr-defined]
    bias = {str(tokenizer.convert_tokens_to_ids("<|system|>")): 100}
    [choice] = ask(client, logit_bias=bias, parallel_tool_calls=False)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (
        "tool_calls",
        None,
    )
    assert len(calls_of(choice["message"])) == 1
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9


def test_a_conversation_with_calls() -> None:
    from transformers import AutoTokenizer

    from engine.default_model import checkpoint_path
    from engine.server.request.bodies import Message, Tool
    from engine.server.request.prompts import encode_chat

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "<|end|>"}'},
    }
    messages = [
        Message.model_validate({"role": "user", "content": "go"}),
        Message.model_validate(
            {"role": "assistant", "content": None, "tool_calls": [call]}
        ),
        Message.model_validate(
            {"role": "tool", "tool_call_id": "call_1", "content": "3 <|end|>"}
        ),
    ]
    tools = [Tool.model_validate(tool("f", CITY))]
    context: Any = SimpleNamespace(
        llm=SimpleNamespace(tokenizer=tokenizer), max_characters=10_000
    )
    ids = encode_chat(context, messages, tools=tools)
    text = tokenizer.decode(ids)
    assert (
        '<tool_call>\n{"name": "f", "arguments": {"a": "<|end|>"}}\n</tool_call><|end|>'
        in text
    )
    assert "<|user|><tool_response>3 <|end|>" in text
    assert "f(city: Rome|Oslo): does f" in text
    # the system's text and three messages
    assert ids.count(tokenizer.eos_token_id) == 4


def test_calls_in_other_forms_are_the_same_conversation() -> None:
    from engine.server.request.bodies import ChatRequest

    def rendered(
        called: dict[str, Any], answered: dict[str, Any]
    ) -> list[dict[str, Any]]:
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", **called},
            {"content": "3", **answered},
        ]
        return [
            each.for_template()
            for each in ChatRequest.model_validate({"messages": messages}).messages[1:]
        ]

    def call(arguments: str) -> dict[str, Any]:
        function = {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        return {"tool_calls": [function]}

    written = {
        "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "f", "input": 'a"b'}}
        ]
    }
    answer = {"role": "tool", "tool_call_id": "c"}
    assert rendered(written, answer) == rendered(
        call(json.dumps({"input": 'a"b'})), answer
    )
    old, [former, answered] = (
        call('{"a": 1}'),
        rendered(
            {"function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f"},
        ),
    )
    assert (
        former["tool_calls"][0]["function"]
        == rendered(old, answer)[0]["tool_calls"][0]["function"]
    )
    assert answered == {"role": "tool", "name": "f", "content": "3"}


@pytest.mark.parametrize(
    ("fields", "param", "says", "pointer"),
    [
        (
            {"tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "'x'; there are: roll_dice",
            None,
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes", None),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "allowed_tools", None),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice",
            "of tools",
            None,
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools", None),
        ({"functions": [{"name": "f"}]}, "functions", "former field", None),
        (
            {"tools": [*TOOLS, tool("roll_dice")]},
            "tools[2].function.name",
            "tools[0]",
            None,
        ),
        (
            {"tools": [tool("no spaces")]},
            "tools[0].function.name",
            "match pattern",
            None,
        ),
        (
            {"tools": [custom("no spaces")]},
            "tools[0].custom.name",
            "tools[0].custom.name",
            None,
        ),
        (
            {
                "tools": None,
                "functions": [{"name": "f"}],
                "function_call": {"name": "x"},
            },
            "function_call",
            "'x'",
            None,
        ),
        (
            {"tools": [*TOOLS, tool("f", WRONG, strict=True)]},
            "tools[2].function.parameters",
            "strin",
            "/properties/a/type",
        ),
        (
            {"tools": [tool("f", {"type": "array"}, strict=True)]},
            "tools[0].function.parameters",
            "object",
            None,
        ),
        (
            {"tool_choice": "required", "backend": "outlines"},
            "backend",
            "structural_tag",
            None,
        ),
    ],
)
def test_refusals(
    hermes: TestClient,
    fields: dict[str, Any],
    param: str,
    says: str,
    pointer: str | None,
) -> None:
    error = refusal(hermes, **fields)
    assert (error["param"], error["pointer"]) == (param, pointer)
    assert says in error["message"]


def test_a_model_without_a_format_of_calls(client: TestClient) -> None:
    error = refusal(client)
    assert error["param"] == "tools"
    assert "--tool-format" in error["message"]
    assert (
        client.post(
            CHAT, json={**USER, "tools": TOOLS, "tool_choice": "none", "max_tokens": 2}
        ).status_code
        == 200
    )
