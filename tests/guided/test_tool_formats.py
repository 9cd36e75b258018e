"""Function calls and thoughts: what the constraint enforces is what the parser reads,
in every format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided.backends import Backends
from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import TokenRejected, UnsupportedConstraint
from guided.tags.styles import STYLES
from guided.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Calls,
    Function,
    ToolFormat,
    answer_format,
    detect,
    tool_format,
)
from guided.tools.output_parser import OutputParser, Piece
from guided.vocabulary import Vocabulary


def deepseek(text: str) -> str:
    """Return `text` with the names of DeepSeek's tokens, which contain unusual
    characters."""
    text = re.sub(
        r"<\|(tool_\w+)\|>",
        lambda name: f"<\uff5c{name[1].replace('_', chr(0x2581))}\uff5c>",
        text,
    )
    return text.replace("|DSML|", "\uff5cDSML\uff5c")


def known_format(name: str) -> ToolFormat:
    found = tool_format(name)
    assert found is not None
    return found


def function_of(
    name: str, schema: dict[str, Any], text: Constraint | None = None
) -> Function:
    return Function(name, Constraint.json_schema(schema), text)


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "string", "maxLength": 3},
        {"enum": ["a", {"b": '}"]'}, None]},
        {"type": "string", "pattern": "^[a-c<{}]{1,3}$"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ]
)


def _object(parts: list[Any]) -> dict[str, Any]:
    names = [f"p{index}" for index in range(len(parts))]
    properties = dict(zip(names, parts, strict=True))
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2).map(_object), max_leaves=4
).map(lambda schema: schema if schema.get("type") == "object" else _object([schema]))
FUNCTIONS = st.dictionaries(
    st.sampled_from(["f", "get_weather", "get_weather_v2", "mcp:f", "f:1"]),
    SCHEMAS,
    min_size=1,
    max_size=3,
)


def written(
    matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, marks: list[str]
) -> str | None:
    """Generate an output: random allowed tokens, with `marks` and structure more often
    than by chance."""
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    output = b""
    calls = 0
    for _ in range(300):
        if matcher.is_accepting() and generator.random() < (0.1 if calls == 0 else 0.4):
            return output.decode(errors="ignore")
        if generator.random() < 0.3:
            mark = generator.choice(marks)
            trial = matcher.fork()
            try:
                trial.accept_tokens(vocabulary.encode(mark))
            except TokenRejected:
                pass
            else:
                matcher, output, calls = trial, output + mark.encode(), calls + 1
                continue
        matcher.fill_bitmask(row)
        allowed = np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)
        if not len(allowed):
            assert matcher.is_accepting(), output
            return output.decode(errors="ignore")
        structural = [
            token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],'
        ]
        token = int(
            generator.choice(
                structural if structural and generator.random() < 0.7 else list(allowed)
            )
        )
        matcher.accept_tokens([token])
        output += vocabulary.token_bytes[token]
    return None


def joined(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return thoughts, text, and (name, arguments) of each call."""
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.index == len(calls)
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.index][1] += piece.text
    by_kind = {
        kind: "".join(p.text for p in pieces if p.kind == kind)
        for kind in ("reasoning", "text")
    }
    return (
        by_kind["reasoning"],
        by_kind["text"],
        [(name, arguments) for name, arguments in calls],
    )


def grown(
    parser: OutputParser, output: str, step: Callable[[], int], *, finished: bool = True
) -> list[Piece]:
    """Read an output that grows by `step` characters each time."""
    pieces: list[Piece] = []
    end = 0
    while end < len(output):
        end = min(len(output), end + step())
        pieces += parser.feed(output[:end], finished=False)
    return pieces + parser.feed(output, finished)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    functions=FUNCTIONS,
    required=st.booleans(),
    parallel=st.booleans(),
    with_answer=st.booleans(),
    thinking=st.sampled_from(["open", "possible", "no", None]),
    seed=st.integers(0, 10_000),
)
def test_what_is_enforced_is_what_is_read(
    backends: Backends,
    vocabulary: Vocabulary,
    name: str,
    functions: dict[str, Any],
    required: bool,
    parallel: bool,
    with_answer: bool,
    thinking: Any,
    seed: int,
) -> None:
    form = known_format(name)
    reasoning = REASONING_FORMATS.get(
        name if thinking is None or name in ("harmony", "kimi_k3") else "think"
    )
    answer = (
        {"type": "json_schema", "json_schema": {"enum": [form.trigger]}}
        if with_answer
        else None
    )
    offered = [function_of(each, schema) for each, schema in functions.items()]
    calls = Calls(form, offered, required, parallel, answer)
    format_ = answer_format(calls, reasoning, thinking or "no")
    constraint = Constraint.structural_tag(
        {"type": "structural_tag", "format": format_}
    )
    try:
        matcher = backends["llguidance"].compile(constraint).matcher()
    except UnsupportedConstraint:  # an enum with an object
        assert STYLES[form.style].item
        return
    generator = random.Random(seed)
    marks = [form.trigger, *([reasoning.begin, reasoning.end] if reasoning else [])]
    ends = [
        STYLES[form.style].end.replace("{name}", place)
        for place in ("p0", "p1")
        if form.style in STYLES
    ]
    marks += [mark for end in ends for mark in (end, end.rstrip()) if mark]
    marks += (
        [kind for kind in STYLES[form.style].kinds if kind]
        if form.style in STYLES
        else []
    )
    output = written(matcher, vocabulary, generator, marks)
    if output is None:
        return

    def parser() -> OutputParser:
        anywhere = calls.anywhere(reasoning)
        return OutputParser(
            reasoning,
            thinking=thinking == "open",
            tools=form,
            functions=offered,
            anywhere=anywhere,
        )

    whole = parser()
    thoughts, text, found = joined(whole.feed(output, finished=True))
    assert whole.complete
    for called, arguments in found:
        jsonschema.validate(json.loads(arguments), functions[called])
    assert found or not required
    assert len(found) <= 1 or parallel
    assert not calls.anywhere(reasoning) or form.trigger not in text
    if found and not calls.anywhere(reasoning):
        assert not text or form.preamble is not None
    if answer and not found:
        assert json.loads(text) == form.trigger
    if reasoning is not None:
        assert reasoning.begin not in text or answer or form.answer
        assert not thoughts or reasoning.end not in thoughts
    # The same, as the text grows.
    assert joined(grown(parser(), output, lambda: generator.randint(1, 9))) == (
        thoughts,
        text,
        found,
    )


M3 = "]<]minimax[>["
TWO = [("f", {"a": "x"}), ("g", {"b": [1, {"c": "}"}]})]
"""The calls of most samples."""
SAMPLES: dict[str, tuple[str, tuple[str, str, list[tuple[str, Any]]]]] = {
    "qwen_3": (
        '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call> so',
        ("", "so", [("f", {"a": "x"})]),
    ),
    "exaone": (
        '<tool_call>{"name": "g", "arguments": {"b": []}}</tool_call>',
        ("", "", [("g", {"b": []})]),
    ),
    "cohere": (
        '<cofl:tool_calls><cofl:tool_call id="0" name="f"><cofl:value name="a" type="raw">x</cofl:value>'
        '</cofl:tool_call><cofl:tool_call id="1" name="g"><cofl:value name="b" type="list"><cofl:value type="json">1'
        '</cofl:value><cofl:value type="dict"><cofl:value name="c" type="raw">}</cofl:value></cofl:value></cofl:value>'
        "</cofl:tool_call></cofl:tool_calls>",
        ("", "", TWO),
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n<invoke name="g">\n'
        '<parameter name="b">[1, {"c": "}"}]</parameter>\n</invoke>\n</minimax:tool_call>',
        ("", "", TWO),
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<a>x{M3}</a>{M3}</invoke>\n{M3}<invoke name="g">{M3}<b>'
        f"{M3}<item>1{M3}</item>{M3}<item>{M3}<c>}}{M3}</c>{M3}</item>{M3}</b>{M3}</invoke>\n{M3}</tool_call>",
        ("", "", TWO),
    ),
    "mimo": (
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"
        '<tool_call><function=g><parameter=b>[1, {"c": "}"}]</parameter></function></tool_call>',
        ("", "", TWO),
    ),
    "gemma_4": (
        'Hi <|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|><|tool_call>call:g{b:[1,{c:<|"|>}<|"|>}]}<tool_call|>',
        ("", "Hi", TWO),
    ),
    "llama_4": ("[f(a='x'), g(b=[1, {'c': \"}\"}])]", ("", "", TWO)),
}
"""Name of a format -> an output as the models write it, and its thoughts, its text and
its calls.

Those of the other formats are in `test_recorded_calls.py`.
"""
F = function_of("f", {"type": "object", "properties": {"a": {"type": "string"}}})
G = function_of("g", {"type": "object", "properties": {"b": {"type": "array"}}})


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("length", [1, 7, 10_000])
def test_as_the_models_write_it(name: str, length: int) -> None:
    output, expected = SAMPLES[name]
    parser = OutputParser(tools=tool_format(name), functions=[F, G])
    thoughts, text, calls = joined(grown(parser, output, lambda: length))
    assert (
        thoughts,
        text,
        [(called, json.loads(arguments)) for called, arguments in calls],
    ) == expected
    assert parser.complete


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '{"name": "f", "arguments": {}}'),
        ("llama", '{"name":"f", "parameters": {}}'),
        ("hermes", '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'),
        (
            "deepseek_v3_1",
            deepseek("<|tool_call_begin|>f<|tool_sep|>{}<|tool_call_end|>"),
        ),
        ("qwen_3_5", "<tool_call>\n<function=h>\n</function>\n</tool_call>"),
    ],
)
def test_text_without_a_trigger_is_no_call(name: str, text: str) -> None:
    parser = OutputParser(tools=tool_format(name), functions=[F, G])
    assert joined(grown(parser, text, lambda: 3)) == ("", text, [])


TEXTS = [
    "it's",
    '"x" \\ "y"',
    "a\n}{,][)(:=",
    "Zürich 東京 👩\u200d💻",
    "<|tool_call>call:f{}<tool_call|> [f()]",
    "",
    "True, null",
]
MANY = function_of(
    "f",
    {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "item": {"type": "array", "items": {"type": "string"}},
            "c": {
                "type": "object",
                "properties": {"d e": {"type": ["number", "null"]}},
                "required": ["d e"],
            },
            "free": {"type": "object"},
        },
        "required": ["item"],
        "additionalProperties": False,
    },
)


def gemma(value: Any) -> str:
    """Return a value as Gemma's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{name}:{gemma(part)}" for name, part in value.items())
            + "}"
        )
    return (
        "[" + ",".join(map(gemma, value)) + "]"
        if isinstance(value, list)
        else json.dumps(value)
    )


def call_in(name: str, arguments: dict[str, Any]) -> str:
    if name == "gemma_4":
        return f"<|tool_call>call:f{gemma(arguments)}<tool_call|>"
    return f"[f({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["gemma_4", "llama_4"])
def test_any_text_in_a_list_of_arguments(
    backends: Backends, vocabulary: Vocabulary, name: str, text: str
) -> None:
    tools = known_format(name)
    for required in (True, False):
        form = answer_format(Calls(tools, [MANY], required, True), None)
        grammar = backends["llguidance"].compile(
            Constraint.structural_tag({"format": form})
        )
        for arguments in (
            {"a": text, "item": [text, ""], "c": {"d e": -1.5e-05}},
            {"item": [], "free": {"x": {"y z": [True, None, text]}}},
        ):
            output = call_in(name, arguments)
            matcher = grammar.matcher()
            matcher.accept_tokens(vocabulary.encode(output))
            assert matcher.is_accepting()
            parser = OutputParser(
                tools=tools, functions=[MANY], anywhere=name == "gemma_4"
            )
            _, rest, [(called, written)] = joined(grown(parser, output, lambda: 3))
            assert (called, json.loads(written), rest) == ("f", arguments, "")


@pytest.mark.parametrize(
    "arguments",
    [{}, {"a": "x"}, {"item": [1]}, {"item": [], "a": ""}, {"item": [], "x": 1}],
)
@pytest.mark.parametrize("name", ["gemma_4", "llama_4"])
def test_a_list_of_arguments_satisfies_the_schema(
    backends: Backends, vocabulary: Vocabulary, name: str, arguments: dict[str, Any]
) -> None:
    """Required arguments, their types and their order."""
    form = answer_format(Calls(known_format(name), [MANY], False, True), None)
    matcher = (
        backends["llguidance"]
        .compile(Constraint.structural_tag({"format": form}))
        .matcher()
    )
    with pytest.raises(TokenRejected):
        matcher.accept_tokens(vocabulary.encode(call_in(name, arguments)))


def test_text_of_llama_4_does_not_begin_like_a_call(
    backends: Backends, vocabulary: Vocabulary
) -> None:
    form = answer_format(Calls(known_format("llama_4"), [F], False, True), None)
    grammar = backends["llguidance"].compile(
        Constraint.structural_tag({"format": form})
    )
    for text, allowed in (
        ("See [f(1)]", True),
        ("", True),
        ("[1]", False),
        ("\n[f(", False),
        ("<think>", False),
    ):
        matcher = grammar.matcher()
        assert (
            matcher.accepts(vocabulary.encode(text)) == len(vocabulary.encode(text))
        ) is allowed, text


def test_strings_between_special_tokens() -> None:
    """Gemma's quotation mark is a token. No text within a string looks like it."""
    marks = ['<|"|>', "<|tool_call>", "<tool_call|>"]
    special = {mark: 257 + index for index, mark in enumerate(marks)}
    data = (b"</s>", *(bytes([byte]) for byte in range(256)), *(b"" for _ in marks))
    names = {"</s>": 0, **special}
    tokens = [
        {"id": token, "content": name, "special": True} for name, token in names.items()
    ]
    vocabulary = Vocabulary(
        data, (0,), frozenset(names.values()), 288, json.dumps({"added_tokens": tokens})
    )
    function = function_of(
        "f",
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 20}, "b": {}},
        },
    )
    form = answer_format(Calls(known_format("gemma_4"), [function], True, True), None)
    matcher = (
        Backends(vocabulary)["llguidance"]
        .compile(Constraint.structural_tag({"format": form}))
        .matcher()
    )

    def encoded(text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    quote = special['<|"|>']
    begun = [special["<|tool_call>"], *encoded("call:f{a:"), quote]
    for text in (*("x" * 20, "<|", '"|>'), '<|"|'):
        assert (
            matcher.accepts([*begun, *encoded(text), quote, *encoded(",b:"), quote])
            == len(begun) + len(text) + 5
        )
    assert matcher.accepts([*begun, *encoded('<|"|>')]) == len(begun) + 4


def test_an_output_that_was_cut() -> None:
    parser = OutputParser(tools=tool_format("hermes"), functions=[F])
    _, text, calls = joined(
        parser.feed(
            'Hi <tool_call>\n{"name": "f", "arguments": {"a": "\\', finished=True
        )
    )
    assert (text, calls, parser.complete) == ("Hi", [("f", '{"a": "\\')], False)
    parser = OutputParser(tools=tool_format("qwen_3_5"), functions=[F])
    output = "Hi <tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>"
    # such arguments are known at the end
    assert joined(parser.feed(output, finished=True)) == ("", "Hi", [("f", "")])
    assert not parser.complete
    think = OutputParser(REASONING_FORMATS["think"], thinking=True)
    assert joined(think.feed("so </thi", finished=True))[0] == "so </thi"


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("anywhere", [True, False])
def test_a_cut_call_leaves_no_text(name: str, anywhere: bool) -> None:
    """Wherever `max_tokens` cuts an output that is a call, none of its marks is
    text."""
    form = known_format(name)
    begin = form.opening + form.call[0].replace("{name}", "f").replace("{number}", "0")
    for length in range(len(begin)):
        parser = OutputParser(tools=form, functions=[F], anywhere=anywhere)
        _, text, _ = joined(grown(parser, begin[:length], lambda: 3, finished=False))
        assert text == "", begin[:length]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_cut_thoughts_leave_no_text(name: str) -> None:
    form = REASONING_FORMATS[name]
    before, end = f"{form.begin}so", form.end + form.between + form.answer
    for length in range(len(before + end)):
        thoughts, text, _ = joined(
            OutputParser(form).feed((before + end)[:length], finished=False)
        )
        assert (thoughts, text) == ("so"[: max(0, length - len(form.begin))], "")
    for length in range(1, len(form.answer)):
        assert joined(
            OutputParser(form).feed(form.answer[:length], finished=False)
        ) == ("", "", [])


@pytest.mark.parametrize(
    ("written", "schema", "read"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("3", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}, "3"),
        ('{"x": 1}', {"type": "string"}, '{"x": 1}'),
        ('{"x": "</arg_value>"}', {"type": "object"}, {"x": "</arg_value>"}),
        ("  x\n", {"type": "string"}, "  x\n"),
        ("True", {"type": "boolean"}, True),
        ('"x"', {}, '"x"'),
    ],
)
def test_the_schema_decides_between_text_and_json(
    written: str, schema: Any, read: Any
) -> None:
    function = function_of("f", {"type": "object", "properties": {"a": schema}})
    parser = OutputParser(tools=tool_format("glm_4_7"), functions=[function])
    output = (
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{written}</arg_value></tool_call>"
    )
    [(_, arguments)] = joined(parser.feed(output, finished=True))[2]
    assert json.loads(arguments) == {"a": read}


def test_arguments_that_are_no_json_end_the_output(
    backends: Backends, vocabulary: Vocabulary
) -> None:
    function = function_of("f", {}, Constraint.regex("[a-z ]+"))
    calls = Calls(known_format("hermes"), [function], required=True, parallel=True)
    constraint = Constraint.structural_tag(
        {"type": "structural_tag", "format": answer_format(calls, None)}
    )
    output = '<tool_call>\n{"name": "f", "arguments": select all'
    matcher = backends["llguidance"].compile(constraint).matcher()
    matcher.accept_tokens(vocabulary.encode(output))
    assert matcher.is_accepting()
    parser = OutputParser(tools=calls.format, functions=[function], anywhere=False)
    assert joined(grown(parser, output, lambda: 3)) == ("", "", [("f", "select all")])
    assert parser.complete


def test_thoughts() -> None:
    think = REASONING_FORMATS["think"]
    assert joined(OutputParser(think).feed("<think>a</think>\n\nb", finished=True)) == (
        "a",
        "b",
        [],
    )
    assert joined(OutputParser(think).feed("b <think>", finished=True)) == (
        "",
        "b <think>",
        [],
    )
    harmony = REASONING_FORMATS["harmony"]
    output = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert joined(OutputParser(harmony).feed(output, finished=True)) == ("a", "b", [])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (
            '{% if tools %}<tool_call>\n{"name": .., "arguments": ..}{% endif %}',
            "hermes",
            None,
        ),
        (
            "<tool_call>\n<function=x>\n<parameter= arguments </think>",
            "qwen_3_5",
            "think",
        ),
        ("<tool_call><function= arguments", "mimo", None),
        ("<tool_call>name<arg_key> arguments", "glm_4_7", None),
        ('[TOOL_CALLS] {"name"', "mistral", None),
        ("[TOOL_CALLS][ARGS][THINK][/THINK]", "tekken", "mistral"),
        ("<|tool_calls_begin|>```json </think>", "deepseek_r1", "think"),
        ("<|tool_calls_begin|>", "deepseek_v3_1", None),
        ('"parameters": dictionary ... ipython', "llama", None),
        ("<|channel|> functions", "harmony", "harmony"),
        (
            "<|channel>thought<channel|><|tool_call>call: <tool_call|> arguments",
            "gemma_4",
            "gemma_4",
        ),
        ("format: [func_name1(param1=value1)] ipython", "llama_4", None),
        ("{{ messages }}", None, None),
    ],
)
def test_formats_are_chosen_from_the_template(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert detect(deepseek(template), TOOL_FORMATS) == tools
    assert detect(template, REASONING_FORMATS) == reasoning


@pytest.mark.parametrize(
    "parameters",
    [{"type": "object"}, {"$comment": "not enforced", "type": "object"}, {}],
)
def test_elements_of_any_name_end_with_any_name(
    backends: Backends, vocabulary: Vocabulary, parameters: Any
) -> None:
    """MiniMax M3 writes a name at both ends of an element, which a mask can't
    compare."""
    form = known_format("minimax_m3")
    function = function_of("ns:f", {**parameters, "type": "object"})
    document = answer_format(
        Calls(form, [function], required=True, parallel=False), None
    )
    grammar = backends["llguidance"].compile(
        Constraint.structural_tag({"format": document})
    )
    elements = f"{M3}<a>x{M3}</a>{M3}<b c>y{M3}</d>"
    for written, arguments in ((elements, {"a": "x", "b c": "y"}), ("", {})):
        output = f'{M3}<tool_call>\n{M3}<invoke name="ns:f">{written}{M3}</invoke>\n{M3}</tool_call>'
        matcher = grammar.matcher()
        matcher.accept_tokens(vocabulary.encode(output))
        assert matcher.is_accepting()
        parser = OutputParser(tools=form, functions=[function], anywhere=False)
        _, text, [(name, found)] = joined(grown(parser, output, lambda: 3))
        assert (text, name, json.loads(found), parser.complete) == (
            "",
            "ns:f",
            arguments,
            True,
        )
