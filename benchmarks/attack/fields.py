"""Attacks by what single fields hold: numbers, text, functions, regexes, grammars, schemas, formats, counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from benchmarks.attack.case import Target, case
from benchmarks.chaos.traffic import CHAT, COMPLETIONS
from guided.backends import BACKENDS

RESPONSES, CHECK, TOKENIZE = "/v1/responses", "/v1/check", "/tokenize"
USER = {"role": "user", "content": "a"}
SURROGATE = "\ud800"


def _text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 16, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 16, **fields}


def _tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _nested(depth: int, inner: Any, key: str = "properties") -> Any:
    for _ in range(depth):
        inner = {"type": "object", key: {"a": inner}}
    return inner


async def _with_each_backend(target: Target, *constraints: dict[str, Any]) -> None:
    for backend in ("auto", *BACKENDS):
        await target.posts(
            *(_text(**each, backend=backend) for each in constraints), limit=55, allowed=("backend_error",)
        )


@case("new", seconds=60)
async def numbers_at_the_edge(target: Target) -> None:
    """Numbers that JSON, Python and float32 can hold, and an engine cannot."""
    big = 10**60
    beams = {"use_beam_search": True, "best_of": 2, "temperature": 0, "max_tokens": 1900, "ignore_eos": True}
    fields: list[dict[str, Any]] = [
        *({name: big} for name in ("top_k", "min_tokens", "seed", "n", "best_of", "logprobs", "max_tokens")),
        *({name: -big} for name in ("top_k", "min_tokens", "seed", "n", "max_tokens")),
        *({"repetition_penalty": value} for value in (1e-320, 1e-40, 1e-3, 1e300)),
        *({"temperature": value} for value in (1e-320, 1.1e-5, 1e300)),
        *({"top_p": value} for value in (1e-320, 1e-9)),
        {"min_p": 1.0},
        {"logit_bias": {"5": 1e308}},
        {"logit_bias": {"9" * 80: 1}},
        {"stop_token_ids": [big]},
        {"prompt": [big]},
        *({**beams, "length_penalty": value} for value in (100, -100, 1e308)),
        *({**beams, "length_penalty": value, "max_tokens": 200} for value in (10, -10)),
    ]
    await target.posts(*(_text(**each) for each in fields), limit=55)
    await target.posts(*(_text(**each, regex="[a-z]{9}") for each in fields[:20]), limit=55)
    for name in ("max_reasoning_tokens", "top_logprobs", "max_completion_tokens"):
        await target.post(_chat(**{name: big}), CHAT)


@case("new", seconds=40)
async def surrogates_and_nul(target: Target) -> None:
    """Lone surrogates and NUL characters in every place that holds text, and in names of fields."""
    for bad in (SURROGATE, "\x00", "\uffff", "a\r\nx: y"):
        schema = {"type": "object", "properties": {bad: {"type": "string"}}, "required": [bad]}
        texts: list[dict[str, Any]] = [
            {bad: 1},
            *({name: bad} for name in ("prompt", "model", "stop", "regex", "grammar", "json_schema", "backend")),
            *({name: bad} for name in ("structural_tag", "guided_decoding_backend", "user", "suffix")),
            *({"json_schema": each} for each in (schema, {"enum": [bad]}, {"pattern": bad}, {"format": bad})),
            {"choice": [bad]},
            {"json_object": True, "whitespace_pattern": bad},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": bad}}},
            {"logit_bias": {bad: 1}},
            {"vllm_xargs": {bad: bad}},
            {"echo": True, "prompt": bad},
        ]
        await target.posts(*(_text(**each) for each in texts))
        message = {"role": "user", "content": [{"type": "text", "text": bad}], "name": bad}
        call = {"id": bad, "function": {"name": bad, "arguments": bad}}
        chats: list[dict[str, Any]] = [
            {"messages": [message]},
            {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]},
            {"tools": [_tool({"type": "object", "description": bad})]},
            {"tools": [_tool({"type": "object", "description": bad})], "tool_choice": "none"},
            {"tools": [_tool({}, name=bad)], "tool_choice": bad},
            {"chat_template_kwargs": {bad: bad}},
            {"reasoning_effort": bad},
            {"response_format": {"type": "json_schema", "json_schema": {"name": bad, "schema": True}}},
        ]
        await target.posts(*(_chat(**each) for each in chats), path=CHAT)
        await target.posts(*(_chat(**each) for each in chats), path=CHECK)
        inputs: list[dict[str, Any]] = [
            {"input": bad},
            {"input": "a", "instructions": bad},
            {"input": "a", "text": {"format": {"type": "json_schema", "name": bad, "schema": {}}}},
            {"input": "a", "tools": [{"type": "function", "name": "f", "description": bad}], "tool_choice": "none"},
            {"input": "a", "reasoning": {"effort": bad}, "stream": True},
        ]
        await target.posts(*({"max_output_tokens": 16, **each} for each in inputs), path=RESPONSES)
        await target.post({"prompt": bad, "return_token_strs": True}, TOKENIZE)


@case("new", seconds=60)
async def arguments_of_calls(target: Target) -> None:
    """Arguments of earlier calls as text: nested 900 levels, a million lists, a long number, a key twice."""
    texts = ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" + "[]," * 1_000_000 + "[]]"]
    texts += ['{"a": ' + "9" * 4300 + "}", '{"a": 1e999}', '{"a": 1, "a": 2}', "{}" * 500_000]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in texts]
    for each in calls:
        body = _chat(messages=[USER, {"role": "assistant", "tool_calls": [each]}, {"role": "tool", "content": "a"}])
        await target.post(body, CHAT)
    many = [USER, {"role": "assistant", "tool_calls": calls[:1] * 5_000}]
    await target.posts(*[_chat(messages=many)] * 4, path=CHAT)


@case("new", seconds=90)
async def parameters_of_functions(target: Target) -> None:
    """Functions whose parameters are deep, large, recursive or no schema; thousands of functions and choices."""
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}
    parameters: list[Any] = [
        *(_nested(depth, {"type": "string"}) for depth in (31, 100)),
        {"properties": {"a": {"enum": [f"{number:05}" for number in range(9_999)]}}},
        {"properties": {"a": {"type": "string", "pattern": "^(a{0,100}){0,100}$"}}},
        {"properties": {"a": {"type": "string", "pattern": "^.{5000}$", "maxLength": 10**30}}},
        {"properties": {f"p{number}": {"type": "string"} for number in range(5_000)}},
        {"$ref": "#/$defs/a", "allOf": 5},
        {"$ref": "#/$defs/a", "allOf": {"a": 5}, "$defs": {"a": True}},
        {"allOf": [loop, loop]},
        loop,
        {"k" * 1_000_000: [0] * 20_000},
        {"properties": 5},
        {"properties": {"a": {"minimum": 10**90, "multipleOf": 1e-300}}},
    ]
    bodies = [_chat(tools=[_tool(each)], tool_choice=choice) for each in parameters for choice in ("auto", "required")]
    await target.posts(*bodies, path=CHAT, limit=85)
    await target.posts(*bodies[::2], path=CHECK, limit=85)
    several = [_tool({"type": "object", "properties": {"a": {"type": "string"}}}, f"f{each}") for each in range(2_000)]
    chosen = [{"type": "function", "name": f"f{each}"} for each in range(2_000)] * 4
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": chosen}
    await target.posts(_chat(tools=several), _chat(tools=several, tool_choice=allowed), path=CHAT, limit=60)
    odd: tuple[Any, ...] = (5, [], {}, {"type": "function"}, {"type": "allowed_tools", "tools": {}}, "f0" * 100_000)
    for choice in odd:
        await target.post(_chat(tools=several[:2], tool_choice=choice), CHAT)


@case("new", seconds=90)
async def structural_tags(target: Target) -> None:
    """Structural tags with thousands of triggers, tags and excludes, deep formats and large repetitions."""
    text, content = {"type": "any_text"}, {"type": "regex", "pattern": "[a-z]+"}
    names = [f"<{number:05}>" for number in range(24_000)]
    tags = [{"begin": name, "content": content, "end": "</a>"} for name in names[:2_500]]
    deep: dict[str, Any] = content
    for _ in range(60):
        deep = {"type": "optional", "content": {"type": "sequence", "elements": [deep, deep]}} if _ < 10 else {
            "type": "sequence", "elements": [deep]
        }  # fmt: skip
    formats: list[dict[str, Any]] = [
        {"type": "triggered_tags", "triggers": names, "tags": tags[:1]},
        {"type": "triggered_tags", "triggers": names[:1_900], "tags": tags[:90]},
        {"type": "triggered_tags", "triggers": ["<"], "tags": tags[:1_900], "excludes": names},
        {"type": "triggered_tags", "triggers": names[:900], "tags": tags[:900]},
        {"type": "dispatch", "rules": [[name, content] for name in names[:6_000]]},
        {"type": "or", "elements": [{"type": "const_string", "value": name} for name in names[:8_000]]},
        {"type": "repeat", "min": 0, "max": 10_000, "content": {"type": "repeat", "min": 9, "max": 9_999,
                                                                "content": content}},
        {"type": "repeat", "min": 10**30, "max": 10**40, "content": text},
        {"type": "tag", "begin": "<" * 400_000, "content": text, "end": ">" * 100_000},
        {"type": "any_text", "max_tokens": 10**50, "excludes": names[:1_999]},
        deep,
    ]  # fmt: skip
    await target.posts(*(_text(structural_tag={"format": each}) for each in formats), limit=85)
    await target.post(_text(structural_tag={"structures": [], "triggers": names}))


@case("new", seconds=90)
async def quadratic_fields(target: Target) -> None:
    """Long keys that are reported, estimates for `complete`, triggers, token ids and keywords that are compared."""
    base = "unevaluatedProperties"
    alike = [base[:at] + base[at + 1] + base[at] + base[at + 2 :] for at in range(len(base) - 2)]
    misspelt = dict.fromkeys(alike, 0)
    rotated = {f"{base[at:]}{base[:at]}{number}": 0 for at in range(1, 20) for number in range(900)}
    names = [f"p{number}" for number in range(450)]
    references = {name: {"$ref": "#/$defs/large"} for name in names}
    large = {"type": "object", "required": names, "properties": references}
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(400)}
    several = [f"{number}" for number in range(12_000)]
    required = json.dumps({"properties": dict.fromkeys(several, True), "required": several})
    triggers = ["a" * 300 + f"{number:04}" for number in range(900)]
    triggers += ["a" * number + "b" + "a" * (200 - number) for number in range(200)]
    ids = [{"type": "token", "token": number * (2**61 - 1)} for number in range(1, 8_000)]
    bodies: list[dict[str, Any]] = [
        *({"json_schema": {"enum": ["a"], "properties": {f"{n}" + "'é " * 100_000: misspelt}}} for n in range(20)),
        *(
            {"complete": True, "regex": f"{n}|" + piece}
            for n, piece in enumerate(("x{10000}" * 60_000, "😀{9999}" * 9))
        ),
        {"complete": True, "json_schema": {**large, "$defs": {"large": {"const": "x" * 450_000}}}},
        {"complete": True, "json_schema": {"$ref": "#/$defs/a0", "$defs": {**chain, "a400": {"type": "string"}}}},
        {"complete": True, "json_schema": {"const": {"$ref": "#/const/a/" + "9" * 5_000, "a": [1]}}},
        {"complete": True, "json_schema": required},
        {"complete": True, "grammar": 'start: "' + "{999999" * 70_000 + '"'},
        {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "json_object"}] * 12_000}}},
        {"structural_tag": {"format": {"type": "dispatch", "rules": [[t, {"type": "any_text"}] for t in triggers]}}},
        {"structural_tag": {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ids}}},
        {"json_schema": {"type": "object", **rotated}},
        {"regex": "(?a)(?u)x"},
        {"grammar": 'start: "a"~1..4000000 // ::='},
        {"choice": [f"{number:040}" for number in range(9_999)], "stop": [f"x{number}" for number in range(64)]},
    ]
    await target.posts(*(_text(**each) for each in bodies), limit=85)
    for kind in (SURROGATE, "x" * 100_000):
        await target.post(_chat(messages=[{"role": "user", "content": [{"type": kind, "text": "a"}]}]), CHAT)
        for given in ([{"type": kind}], [{"role": "user", "content": [{"type": kind, "text": "a"}]}]):
            await target.post({"input": given, "max_output_tokens": 9}, RESPONSES)


@case("new", seconds=300, slow=True)
async def regexes(target: Target) -> None:
    """Regexes with large, nested and ambiguous repetitions, with every backend."""
    patterns = ["a{10000}", "(a{100}){100}", "(.{0,99}){99}", r"[\s\S]{9999}x", r"(\p{L}{50}){50}", "(x+x+)+y"]
    patterns += ["(a|aa|aaa){1,3000}b", "(.*.*.*.*)*=", "(a?){5000}a{5000}", "|".join(f"{n:04}" for n in range(1_999))]
    patterns += [".*a.{20}", "(a*)*b" * 500, "(" * 64 + "a" + ")" * 64, "[" + "a-z" * 50_000 + "]", "a{4294967296}"]
    await _with_each_backend(target, *({"regex": each} for each in patterns))


@case("new", seconds=300, slow=True)
async def grammars(target: Target) -> None:
    """Grammars that are ambiguous, left recursive, or that double with each rule, with every backend."""
    doubling = "start: r60\nr0: " + '"a"\n' + "".join(f"r{n + 1}: r{n} r{n}\n" for n in range(60))
    texts = ['start: start start | "a" | ""', 'start: start "a" | "b"', doubling, "start: A\nA: /(a|b)*a(a|b){18}/"]
    texts += [
        "start: " + " ".join(["a?"] * 1_500) + '\na: "a"',
        'start: "' + "a" * 400_000 + '"',
        "%import x\nstart: x",
    ]
    texts += ["start: " + "".join(f"r{n}\nr{n}: " for n in range(4_900)) + '"a"', 'root ::= root root | "a"']
    texts += ['root ::= "a"{1,10000}', "start: start", 'start: ("a"~1..100)~1..100', 'start: %json {"a": [' + "0," * 9]
    await _with_each_backend(target, *({"grammar": each} for each in texts))


@case("new", seconds=300, slow=True)
async def schemas(target: Target) -> None:
    """Schemas that double with each reference, and large bounds, alternatives, patterns and conditions."""
    doubled = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    wide = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"type": "array"}]} for n in range(40)}
    chain: Any = True
    for number in range(25):
        condition = {"properties": {f"p{number}": {"const": number}}}
        chain = {"if": condition, "then": {"required": [f"q{number}"]}, "else": chain}
    given: list[Any] = [
        {"$ref": "#/$defs/a0", "$defs": {**doubled, "a40": {"type": "string"}}},
        {"$ref": "#/$defs/a0", "$defs": {**wide, "a40": {"type": "string"}}},
        {"type": "string", "minLength": 9_999, "maxLength": 10**40},
        {"type": "array", "items": {"type": "integer"}, "minItems": 9_999, "uniqueItems": True},
        {"type": "array", "items": {"type": "array", "minItems": 90, "items": {"minItems": 90, "type": "array"}}},
        {"type": "number", "minimum": 1e308, "multipleOf": 1e-300},
        {"type": "integer", "minimum": 10**90, "maximum": 10**90 + 1},
        {"const": "a" * 500_000},
        {"enum": [f"{number:050}" for number in range(9_000)]},
        {"type": "object", "patternProperties": {f"^{n:03}.*$": {"type": "string"} for n in range(900)}},
        {"type": "object", "properties": {f"p{n}": {} for n in range(3_000)}, "minProperties": 2_999},
        {"type": "object", "dependentRequired": {f"p{n}": [f"p{n + 1}"] for n in range(2_000)}},
        {"oneOf": [{"type": "object", "properties": {f"p{n}": {"const": n}}} for n in range(999)]},
        {"type": "object", "unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}] * 500},
        {"not": {"enum": list(range(9_000))}},
        chain,
    ]
    await _with_each_backend(target, *({"json_schema": each} for each in given))


@case("new", seconds=190, slow=True)
async def large_grammars_in_use(target: Target) -> None:
    """24 long arrays at once, each with 1,900 alternatives of its own: grammars of 10 MB that are in use."""

    def chat(number: int) -> dict[str, Any]:
        names = [f"p{number}_{each}" for each in range(1_900)]
        items = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in names]
        schema = {"type": "array", "minItems": 200, "items": {"anyOf": items}}
        return _chat(response_format={"type": "json_object", "schema": schema}, max_tokens=1_000)

    await target.posts(*map(chat, range(24)), path=CHAT, limit=180)


@case("new", seconds=190, slow=True)
async def masks_that_become_slow(target: Target) -> None:
    """Eight requests with four outputs each, of ambiguous grammars: each mask takes longer than the one before."""
    texts = [f'start: s "z{number}"?\ns: s s s | s s | "a" | ""' for number in range(8)]
    more = {"backend": "xgrammar", "n": 4, "max_tokens": 300, "ignore_eos": True}
    await target.posts(
        *({**_text(grammar=each), **more} for each in texts), limit=180, allowed=("mask_timeout", "worker_died")
    )


@case("9", seconds=190, slow=True)
async def logprobs_of_long_prompts(target: Target) -> None:
    """20 log-probabilities for each token of twelve prompts of 1,900 tokens, in whole answers and echoed, twice."""
    prompt = list(range(10, 1910))
    bodies = [_text(prompt=prompt, prompt_logprobs=20, seed=n) for n in range(8)]
    bodies += [_text(prompt=prompt, echo=True, logprobs=20, seed=n) for n in range(4)]
    for _ in range(2):
        await target.posts(*bodies, limit=90)


@case("new", seconds=60)
async def large_counts(target: Target) -> None:
    """Counts: messages and their parts, biases, template variables, best_of, functions that are not offered."""
    parts = [{"type": "text", "text": "a"}] * 8_000
    tools = [{"type": "function", "name": f"f{n}", "parameters": {"a": [0] * 60}} for n in range(2_800)]
    long_text = "word " * 700_000
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "word " * 400}] * 2_000},
        {"messages": [{**USER, "name": long_text}]},
        {"logit_bias": dict.fromkeys(map(str, range(20_000)), 1)},
        {"chat_template_kwargs": {f"k{n}": "x" * 3_000 for n in range(1_000)}},
        {"chat_template_kwargs": {"raise_exception": 5, "self": 1, "range": "a", "conversation": "b"}},
        {"reasoning_effort": long_text},
        {"stop": ["a"] * 100_000},
        {"tool_choice": {"type": "function", "function": {"name": long_text}}},
        {"response_format": {"type": "json", "value": json.dumps({"enum": list(range(9_000))})}},
        {"response_format": {"type": "json_object", "schema": {"a": [0] * 20_000}}},
        {"metadata": {f"k{n}": long_text[:500] for n in range(5_000)}},
        {"use_beam_search": True, "best_of": 64, "temperature": 0, "n": 64},
        {"n": 64, "stop": [f"{n:01000}" for n in range(64)]},
        {"complete": True, "choice": [f"{n:060}" for n in range(7_000)]},
    ]
    await target.posts(*(_chat(**each) for each in chats), path=CHAT, limit=55)
    await target.post(_text(prompt=["a"] * 256, best_of=64), limit=55)
    await target.post(_text(prompt=["a " * 8_000] * 250), limit=55)
    items = [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}] * 2_000
    inputs: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": "none", "stream": True},
        {"tools": tools, "tool_choice": "none"},
        {"input": [{"role": "user", "content": "a"}, *items]},
        {"input": [{"role": "assistant", "content": "word " * 400}] * 2_000},
        {"include": ["a"] * 100_000},
    ]
    await target.posts(*({"input": "a", "max_output_tokens": 9, **each} for each in inputs), path=RESPONSES, limit=55)


@case("new", seconds=90)
async def small_schemas(target: Target) -> None:
    """400 schemas of 60 KB, 64 at once: bodies that are small enough for the threads that others use too."""

    def body(number: int) -> dict[str, Any]:
        properties = {f"p{number}_{each}": {"type": "integer", "minimum": each} for each in range(1_200)}
        return _text(json_schema={"type": "object", "properties": properties, "minimum": "a"})

    waiting = iter(range(400))

    async def client() -> None:
        for number in waiting:
            await target.post(body(number), limit=60)

    await asyncio.gather(*(client() for _ in range(64)))


@case("new", seconds=90, slow=True)
async def slow_readers(target: Target) -> None:
    """60 streams with log-probabilities whose clients read nothing for fifteen seconds."""
    body = json.dumps(_text(stream=True, max_tokens=400, ignore_eos=True, logprobs=5)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writers = []
    for _ in range(60):
        reader, writer = await asyncio.open_connection(*target.address, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        writers.append(writer)
    await asyncio.sleep(15)
    for writer in writers:
        writer.transport.abort()


@case("new", seconds=60)
async def pages(target: Target) -> None:
    """300 requests at once for pages that need no key: the documentation, the metrics, the state."""
    paths = (
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/v1/models",
        "/version",
        "/",
        "/health/ready",
        "/nothing",
    )

    async def get(path: str) -> None:
        try:
            response = await target.http.get(path, timeout=30)
            target.answers[str(response.status_code)] += 1
        except httpx.HTTPError as error:
            target.answers[type(error).__name__] += 1

    await asyncio.gather(*(get(path) for path in paths))
    for _ in range(3):
        await asyncio.gather(*(get(paths[number % len(paths)]) for number in range(100)))
