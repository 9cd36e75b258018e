"""JSON: whitespace, long numbers, schemas that are refused, random schemas."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from contract_cases import PERSON, is_json, stop

from guided.backends import BACKENDS, Backends
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    ],
)
def test_a_model_that_repeats_digits_comes_to_an_end(
    backends: Backends, backend: str, vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    """A long number ends, while the digits of a string may be required."""
    for wanted in (schema, {"enum": ["1" * 60]}):
        worker = MaskWorker(vocabulary)
        worker.open(1, backends[backend].compile(Constraint.json_schema(wanted)))
        row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        output: list[int] = []
        while stop(vocabulary) not in output:
            assert worker.fill(1, output[-1:], row) is None
            allowed = allowed_ids(row).tolist()
            digits = [
                token for token in allowed if vocabulary.token_bytes[token].isdigit()
            ]
            ends = [
                token
                for token in (stop(vocabulary), *vocabulary.encode("]"))
                if token in allowed
            ]
            output.append([*digits[::-1], *ends, *allowed][0])
            assert len(output) < 200
        assert is_json(vocabulary.decode(output).decode(), wanted)


def test_a_number_in_a_structural_tag_ends_too(
    backends: Backends, vocabulary: Vocabulary
) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    constraint = Constraint.structural_tag({"type": "structural_tag", "format": form})
    for backend in ("llguidance", "xgrammar"):
        worker = MaskWorker(vocabulary)
        row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        worker.open(
            1,
            backends[backend].compile(constraint),
            tokens=vocabulary.encode("<n>" + "1" * 40),
        )
        assert worker.fill(1, (), row) is None
        assert not any(
            vocabulary.token_bytes[token][:1].isdigit() for token in allowed_ids(row)
        )


def test_compact_whitespace(
    backends: Backends, backend: str, vocabulary: Vocabulary
) -> None:
    compact = (
        backends[backend]
        .compile(Constraint.json_schema(PERSON, whitespace=""))
        .matcher()
    )
    with pytest.raises(TokenRejected):
        compact.fork().accept_tokens(vocabulary.encode('{"name": "Ada"'))
    compact.accept_tokens(vocabulary.encode('{"name":"A da","age":36,"tags":["math"]}'))
    assert compact.is_accepting()


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    *({"indent": blanks} for blanks in range(1, 5)),
]
UNUSUAL = [
    '{ "name"', '{"name" :', '{"name"\n:', '{"name":  "A"', '{"name":\n"A"', '{"name":\t"A"', '{"name":"A" ,',
    '{"name":"A"\n,',
    '{"name":"A", \n"age"', '{"name":"A",\n\n"age"', '{"name":"A",\r\n"age"', '{"name":"A",\n\t"age"', "\n{", "{\n}",
    '{"name":"A","age":1,"tags":[ ]', '{"name":"A","age":1,"tags":[\n]', '{"name":"A","age":1,"tags":["a" ]',
    '{"name":"A","age":1,"tags":["a"\n,', '{"name":"A","age":1,"tags":["a"\n\n]', '{\n' + " " * 33 + '"name"',
    '{"name":"A","age":1,"tags":[]}\n', '{"name":"A","age":1,"tags":[] }',
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_usual_layouts_are_writable(
    backends: Backends, backend: str, vocabulary: Vocabulary, layout: dict[str, Any]
) -> None:
    if backend not in ("llguidance", "xgrammar") and "indent" in layout:
        pytest.skip("line breaks would make an automaton much larger")
    matcher = backends[backend].compile(Constraint.json_schema(PERSON)).matcher()
    for tags in (["math", "a, b: [1]\u00a0"], []):
        text = json.dumps(
            {"name": "A da", "age": 36, "tags": tags}, ensure_ascii=False, **layout
        )
        written = matcher.fork()
        written.accept_tokens(vocabulary.encode(text))
        assert written.is_accepting(), text


@pytest.mark.parametrize("text", UNUSUAL)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_unusual_whitespace_is_not(
    backends: Backends, backend: str, vocabulary: Vocabulary, text: str
) -> None:
    grammar = backends[backend].compile(Constraint.json_schema(PERSON))
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    for tokens in (
        vocabulary.encode(text),
        [vocabulary.encode(character)[0] for character in text],
    ):
        worker = MaskWorker(vocabulary)
        worker.open(0, grammar)
        count = 0
        while (
            count < len(tokens)
            and worker.fill(0, tokens[max(count - 1, 0) : count], row) is None
        ):
            if tokens[count] not in allowed_ids(row):
                break
            count += 1
        assert count < len(tokens)


NESTED: dict[str, Any] = {
    "a": [{"b": [[], {}, [[1, {"c": None}]]]}, "x: , \n"],
    "d": {"e": {"f": {"g": {"h": [0]}}}},
}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nested_documents_are_writable(
    backends: Backends, backend: str, vocabulary: Vocabulary, layout: dict[str, Any]
) -> None:
    text = json.dumps(NESTED, **layout)
    form = {
        "type": "tag",
        "begin": "<f>\n",
        "content": {"type": "json_object"},
        "end": "\n</f>",
    }
    tag = Constraint.structural_tag({"type": "structural_tag", "format": form})
    for constraint, output in (
        (Constraint.json_object(), text),
        (tag, f"<f>\n{text}\n</f>"),
    ):
        matcher = backends[backend].compile(constraint).matcher()
        matcher.accept_tokens(vocabulary.encode(output))
        assert matcher.is_accepting()


ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["x", None]}, "minItems": 1},
        "of": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "m": {"type": "boolean"}},
            "required": ["n"],
        },
    },
    "required": ["name", "tags", "of"],
}
UNUSUAL_LINE = re.compile(rb"[ :]\n|\n *[,:\n]|[\[{]\n *[\]}]|\n {33}|[\t\r]|[,:]  ")
QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*("|$)')


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("in_tag", [False, True])
def test_a_random_model_keeps_to_the_layout(
    backends: Backends, backend: str, vocabulary: Vocabulary, in_tag: bool
) -> None:
    """A model that likes line breaks and brackets breaks no line before a comma, and
    none twice."""
    constraint = Constraint.json_schema(ORDER)
    if in_tag:
        form = {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": ORDER},
            "end": "\n</f>",
        }
        constraint = Constraint.structural_tag(
            {"type": "structural_tag", "format": form}
        )
    grammar = backends[backend].compile(constraint)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    draw = random.Random(0)
    lines = 0
    for _ in range(40):
        worker = MaskWorker(vocabulary)
        worker.open(0, grammar)
        output: list[int] = []
        while len(output) < 120 and stop(vocabulary) not in output:
            assert worker.fill(0, output[-1:], row) is None, vocabulary.decode(output)
            allowed = allowed_ids(row).tolist()
            liked = [
                token for token in allowed if b"\n" in vocabulary.token_bytes[token]
            ]
            ends = [
                token
                for token in allowed
                if vocabulary.token_bytes[token][:1] in b'"]}'
            ]
            output.append(draw.choice(draw.choice([liked, ends, allowed]) or allowed))
        text = QUOTED.sub(b'"s"', vocabulary.decode(output).removesuffix(b"\n</f>"))
        lines += text.count(b"\n")
        assert not UNUSUAL_LINE.search(text), text
    assert lines > 40


def test_escaped_control_characters(
    backends: Backends, backend: str, vocabulary: Vocabulary
) -> None:
    wanted, written = Constraint.json_object(), '{"a":"\\u0001"}'
    if (
        backend == "outlines"
        # its regex of strings has no other escapes, and that of any object takes seconds
    ):
        wanted, written = (
            Constraint.json_schema(PERSON),
            '{"name":"\\n","age":1,"tags":[]}',
        )
    matcher = backends[backend].compile(wanted).matcher()
    matcher.accept_tokens(vocabulary.encode(written))
    assert matcher.is_accepting()


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_escapes_are_writable_in_values_not_in_keys(
    backends: Backends, backend: str, vocabulary: Vocabulary
) -> None:
    fields = {"a": {"type": "string"}, "b": {"type": "string", "minLength": 1}}
    schema = {
        "type": "object",
        "properties": fields,
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = backends[backend].compile(Constraint.json_schema(schema)).matcher()
    written = matcher.fork()
    written.accept_tokens(
        vocabulary.encode(r'{"a":"Z\u00fcr\u0069ch\n\"","b":"x\u0041\t"}')
    )
    assert written.is_accepting()
    key = vocabulary.encode(r'{"\u0061":')
    assert matcher.accepts(key) < len(key)
    empty = vocabulary.encode('{"a":"","b":""}')
    assert matcher.accepts(empty) < len(empty)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"exclusiveMaximum": 1}, "0." + "9" * 24),
        ({"exclusiveMaximum": 0.1}, "0.0" + "9" * 24),
        ({"exclusiveMinimum": -1}, "-0." + "9" * 24),
        ({"exclusiveMinimum": 0.25}, "0.25" + "0" * 24 + "1"),
        ({"exclusiveMinimum": 123456}, "123456." + "0" * 24 + "1"),
        ({"not": {"type": "integer"}}, "99." + "9" * 24),
    ],
)
def test_a_long_number_is_not_rounded_to_an_excluded_one(
    backends: Backends,
    backend: str,
    vocabulary: Vocabulary,
    schema: dict[str, Any],
    text: str,
) -> None:
    try:
        grammar = backends[backend].compile(
            Constraint.json_schema({"type": "number", **schema})
        )
    except UnsupportedConstraint:
        return
    matcher = grammar.matcher()
    with contextlib.suppress(TokenRejected):
        matcher.accept_tokens(vocabulary.encode(text))
        assert not matcher.is_accepting()


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex("(unclosed"),
        Constraint.regex("a(?=b)"),
        Constraint.regex(r"(a)\1"),
        Constraint.json_schema({"type": "string", "pattern": "(?=a)b"}),
        Constraint.json_schema({"type": "string", "pattern": "^{2}times$"}),
        Constraint.json_schema(
            {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
        ),
        Constraint.grammar("start: undefined_rule"),
        Constraint.grammar("root ::= undefined"),
        Constraint.grammar("this is no grammar"),
    ],
    ids=lambda constraint: constraint.source,
)
def test_what_cannot_be_enforced_is_refused(
    backends: Backends, backend: str, constraint: Constraint
) -> None:
    """A malformed or unsupported constraint is an InvalidConstraint: not an internal
    error, and never ignored."""
    if constraint.kind not in BACKENDS[backend].kinds:
        pytest.skip(f"{backend} has no {constraint.kind}")
    try:
        grammar = backends[backend].compile(constraint)
    except InvalidConstraint as refusal:
        assert refusal.param == constraint.kind  # noqa: PT017
    else:
        # Some backends support it, or it is checked.
        assert "not" in constraint.source or "(?=a)" in constraint.source
        matcher = grammar.matcher()
        with contextlib.suppress(TokenRejected):
            matcher.accept_tokens(backends.vocabulary.encode('{"a":"x"}'))
            assert not matcher.is_accepting()
