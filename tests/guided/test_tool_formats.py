"""Function calls and thoughts: what the constraint enforces is what the parser reads, in every format."""

from __future__ import annotations

import json
import random
import re
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
from guided.errors import TokenRejected
from guided.tools.formats import REASONING_FORMATS, TOOL_FORMATS, Calls, Function, answer_format, detect
from guided.tools.parser import OutputParser, Piece
from guided.vocabulary import Vocabulary


def deepseek(text: str) -> str:
    """Return `text` with the names of DeepSeek's tokens, which contain unusual characters."""
    return re.sub(r"<\|(tool_\w+)\|>", lambda name: f"<\uff5c{name[1].replace('_', chr(0x2581))}\uff5c>", text)


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "string", "maxLength": 3},
        {"enum": ["a", {"b": '}"]'}, None]},
        {"type": "string", "pattern": "^[a-c<{}]{1,3}$"},
    ]
)


def _object(parts: list[Any]) -> dict[str, Any]:
    names = [f"p{index}" for index in range(len(parts))]
    properties = dict(zip(names, parts, strict=True))
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2).map(_object), max_leaves=4).map(
    lambda schema: schema if schema.get("type") == "object" else _object([schema])
)
FUNCTIONS = st.dictionaries(st.sampled_from(["f", "get_weather", "get_weather_v2"]), SCHEMAS, min_size=1, max_size=3)


def written(matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, marks: list[str]) -> str | None:
    """Generate an output: random allowed tokens, with `marks` and structure more often than by chance."""
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
        structural = [token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],']
        token = int(generator.choice(structural if structural and generator.random() < 0.7 else list(allowed)))
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
    by_kind = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "text")}
    return by_kind["reasoning"], by_kind["text"], [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
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
    form = TOOL_FORMATS[name]
    reasoning = REASONING_FORMATS.get(name if thinking is None or name == "harmony" else "think")
    answer = {"type": "json_schema", "json_schema": {"enum": [form.trigger]}} if with_answer else None
    calls = Calls(form, [Function(each, schema) for each, schema in functions.items()], required, parallel, answer)
    format_ = answer_format(calls, reasoning, thinking or "no")
    constraint = Constraint.structural_tag({"type": "structural_tag", "format": format_})
    matcher = backends["llguidance"].compile(constraint).matcher()
    generator = random.Random(seed)
    marks = [form.trigger, *([reasoning.begin, reasoning.end] if reasoning else [])]
    output = written(matcher, vocabulary, generator, marks)
    if output is None:
        return

    def parser() -> OutputParser:
        names, anywhere = list(functions), calls.anywhere(reasoning)
        return OutputParser(reasoning, thinking=thinking == "open", tools=form, names=names, anywhere=anywhere)

    whole = parser()
    thoughts, text, found = joined(whole.feed(output, finished=True))
    assert whole.complete
    for called, arguments in found:
        jsonschema.validate(json.loads(arguments), functions[called])
    assert found or not required
    assert len(found) <= 1 or parallel
    assert not calls.anywhere(reasoning) or form.trigger not in text
    if found and not calls.anywhere(reasoning):
        assert not text
    if answer and not found:
        assert json.loads(text) == form.trigger
    if reasoning is not None:
        assert reasoning.begin not in text or answer
        assert not thoughts or reasoning.end not in thoughts
    # The same, as the text grows.
    growing = parser()
    pieces: list[Piece] = []
    end = 0
    while end < len(output):
        end = min(len(output), end + generator.randint(1, 9))
        pieces += growing.feed(output[:end], finished=False)
    pieces += growing.feed(output, finished=True)
    assert joined(pieces) == (thoughts, text, found)


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        (
            "hermes",
            'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            ("Hi.", [("f", '{"a": "}</tool_call>\\"{"}'), ("g", "{}")]),
        ),
        ("llama3", '{"name": "f", "parameters": {"a": [1]}}', ("", [("f", '{"a": [1]}')])),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
            ("", [("f", "{}"), ("g", '{"a": 1}')]),
        ),
        ("tekken", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ("", [("f", '{"a": 1}'), ("g", "{}")])),
        (
            "deepseek",
            "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n{}\n```<|tool_call_end|>\n"
            '<|tool_call_begin|>function<|tool_sep|>g\n```json\n{"a": 1}\n```<|tool_call_end|><|tool_calls_end|>',
            ("", [("f", "{}"), ("g", '{"a": 1}')]),
        ),
        (
            "deepseek-v3.1",
            "Hm<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>",
            ("Hm", [("f", "{}")]),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}',
            ("", [("f", '{"a": 1}')]),
        ),
    ],
)
def test_as_the_models_write_it(name: str, output: str, expected: Any) -> None:
    reasoning = REASONING_FORMATS.get(name)
    parser = OutputParser(reasoning, tools=TOOL_FORMATS[name], names=["f", "g"])
    thoughts, text, calls = joined(parser.feed(deepseek(output), finished=True))
    assert (text, calls) == expected
    assert thoughts == ("Need f." if reasoning else "")


def test_an_output_that_was_cut() -> None:
    parser = OutputParser(tools=TOOL_FORMATS["hermes"], names=["f"])
    _, text, calls = joined(parser.feed('Hi <tool_call>\n{"name": "f", "arguments": {"a": "\\', finished=True))
    assert (text, calls, parser.complete) == ("Hi", [("f", '{"a": "\\')], False)
    assert (
        joined(OutputParser(REASONING_FORMATS["think"], thinking=True).feed("so </thi", finished=True))[0] == "so </thi"
    )


def test_thoughts() -> None:
    think = REASONING_FORMATS["think"]
    assert joined(OutputParser(think).feed("<think>a</think>\n\nb", finished=True)) == ("a", "b", [])
    assert joined(OutputParser(think).feed("b <think>", finished=True)) == ("", "b <think>", [])
    harmony = REASONING_FORMATS["harmony"]
    output = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert joined(OutputParser(harmony).feed(output, finished=True)) == ("a", "b", [])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('{% if tools %}<tool_call>\n{"name": .., "arguments": ..}{% endif %}', "hermes", None),
        ("<tool_call><function= arguments", None, None),
        ('[TOOL_CALLS] {"name"', "mistral", None),
        ("[TOOL_CALLS][ARGS]", "tekken", None),
        ("<|tool_calls_begin|>```json </think>", "deepseek", "think"),
        ("<|tool_calls_begin|>", "deepseek-v3.1", None),
        ('"parameters": dictionary ... ipython', "llama3", None),
        ("<|channel|> functions", "harmony", "harmony"),
        ("{{ messages }}", None, None),
    ],
)
def test_formats_are_chosen_from_the_template(template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect(deepseek(template), TOOL_FORMATS) == tools
    assert detect(template, REASONING_FORMATS) == reasoning
