"""Tests of the contract in `guided.backends.base`, for every registered backend and each of its kinds.

A new backend needs no tests of its own for this: an entry in the registry is enough.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided.backends import BACKENDS, Backends
from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import KINDS, Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["circle", "square"]},
        "size": {"type": "object", "properties": {"w": {"type": "number"}}, "required": ["w"]},
        "visible": {"type": "boolean"},
    },
    "required": ["kind", "size", "visible"],
    "additionalProperties": False,
}
LARK = 'start: "SELECT " column ("," " " column)* " FROM " NAME\ncolumn: NAME | "*"\nNAME: /[a-z]+/\n'
GBNF = 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"\n'


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=dice>", "schema": {"type": "integer", "minimum": 1, "maximum": 6}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
THOUGHTS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "think[", "content": {"type": "any_text"}, "end": "]"},
            {
                "type": "tags_with_separator",
                "separator": ",",
                "at_least_one": True,
                "tags": [
                    {"begin": "<a>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "</a>"},
                    {"begin": "<ab>", "content": {"type": "choice", "choice": ["x", "xy"]}, "end": ["</ab>", "</b>"]},
                    {"begin": "[", "content": {"type": "grammar", "grammar": GBNF}, "end": "]"},
                ],
            },
            {"type": "optional", "content": {"type": "const_string", "value": "!"}},
        ],
    },
}


def is_calls(text: str) -> bool:
    """Whether each `<f=` in `text` begins a valid call."""
    _, trigger, rest = text.partition("<f=")
    if not trigger:
        return True
    name, _, rest = rest.partition(">")
    try:
        arguments, end = json.JSONDecoder().raw_decode(rest)
    except json.JSONDecodeError:
        return False
    schema = {"weather": CITY, "dice": {"enum": [1, 2, 3, 4, 5, 6]}}.get(name, False)
    valid = jsonschema.Draft202012Validator(schema).is_valid(arguments) and rest[end:].startswith("</f>")
    return valid and is_calls(rest[end + 4 :])


def is_thoughts(text: str) -> bool:
    thought, end, rest = text.partition("]")
    one = r"(?:<a>[a-z]+</a>|<ab>xy?</(?:ab|b)>|\[[^\]]*\])"
    lists = re.findall(r"\[([^\]]*)\]", rest)
    return bool(
        end and thought.startswith("think[") and re.fullmatch(f"{one}(?:,{one})*!?", rest) and all(map(is_list, lists))
    )


def is_json(text: str, schema: Any) -> bool:
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def is_list(text: str) -> bool:
    """Whether `text` is a sentence of GBNF: removes the innermost brackets until none is left."""
    inner = re.compile(r"\(\d+(?:,\d+)*\)")
    while inner.search(text):
        text = inner.sub("0", text)
    return re.fullmatch(r"\d+(?:,\d+)*", text) is not None


@dataclass(frozen=True)
class Case:
    """A constraint with texts that satisfy it, texts that don't, and a check."""

    name: str
    constraint: Constraint
    valid: list[str]
    invalid: list[str]
    satisfied: Callable[[str], bool] = field(repr=False)


CASES = [
    Case(
        "person",
        Constraint.json_schema(PERSON),
        ['{"name":"Ada","age":36,"tags":["math","engines"]}', '{"name": "Zoë 狐 😀", "age": -1, "tags": []}'],
        [
            '{"name":"Ada"}',
            '{"name":1,"age":36,"tags":[]}',
            '{"name":"Ada","age":3.5,"tags":[]}',
            "[]",
            '{"name":"a\nb"',
        ],
        lambda text: is_json(text, PERSON),
    ),
    Case(
        "nested",
        Constraint.json_schema(NESTED),
        [
            '{"kind":"circle","size":{"w":1.5},"visible":true}',
            '{"kind": "square", "size": {"w": -2e3}, "visible": false}',
        ],
        ['{"kind":"oval"', '{"kind":"circle","size":{},', '{"kind":"circle","size":{"w":1.},"visible":true}'],
        lambda text: is_json(text, NESTED),
    ),
    Case(
        "object",
        Constraint.json_object(),
        ["{}", '{"a": [1, 2.5, null, {"b": "c"}], "d": true}', '{"é":"\\n\\u0001"}'],
        ["[]", "1", '{"a":1,}', "{a:1}", '{"a" 1}', '{"a":01}'],
        lambda text: isinstance(json.loads(text), dict),
    ),
    Case(
        "phone",
        Constraint.regex(r"^\+?[0-9]{2,3}-(?:[a-f]+|x{2,})é?$"),
        ["12-abc", "+123-xx", "12-xxxxé"],
        ["1-abc", "12-abc\n", "12-", "12-x", "++12-a"],
        lambda text: re.fullmatch(r"\+?[0-9]{2,3}-(?:[a-f]+|x{2,})é?", text) is not None,
    ),
    Case(
        "free",
        Constraint.regex(r"<.{3,}?>|\w+ \S*"),
        ["<abc>", "<日本語 text 😀>", "word ", "two_1 w@rds"],
        ["<ab>", "<a\nb>", " x", "a b c"],
        lambda text: re.fullmatch(r"<.{3,}?>|\w+ \S*", text) is not None,
    ),
    Case(
        "options",
        Constraint.choice(["yes", "yes please", "no", 'qu"o\\te\n', "Zürich", "狐狸", "👩‍👩‍👧", "[a-z]+"]),
        ["yes", "yes please", "no", 'qu"o\\te\n', "Zürich", "狐狸", "👩‍👩‍👧", "[a-z]+"],
        ["maybe", "yes ", "nope", "Yes", "abc", "👩"],
        lambda text: text in ["yes", "yes please", "no", 'qu"o\\te\n', "Zürich", "狐狸", "👩‍👩‍👧", "[a-z]+"],
    ),
    Case(
        "lark",
        Constraint.grammar(LARK),
        ["SELECT a FROM b", "SELECT abc, *, d FROM tables"],
        ["SELECT FROM b", "select a", "SELECT a, FROM b"],
        lambda text: re.fullmatch(r"SELECT (?:[a-z]+|\*)(?:, (?:[a-z]+|\*))* FROM [a-z]+", text) is not None,
    ),
    Case(
        "calls",
        Constraint.structural_tag(CALLS),
        [
            "",
            "Hi! < <f <f",
            '<f=weather>{"city": "Zürich </f>"}</f> and\n<f=dice>6</f><f=dice>1</f>.',
            "ok <f=dice>2</f>",
        ],
        ["<f=x", "<f=dice>7", "Hi <f=dice>1", '<f=weather>{"city": 1', "<f=dice>1<"],
        is_calls,
    ),
    Case(
        "thoughts",
        Constraint.structural_tag(THOUGHTS),
        ["think[]<a>b</a>", "think[x </thin\n[]<ab>xy</b>,[1,(2)],<ab>x</ab>,<a>xyz</a>!"],
        ["<a>b</a>", "think[]", "think[]<a></a>", "think[]<a>b</a>x", "think[][(]", "think[]<ab>y"],
        is_thoughts,
    ),
    Case("gbnf", Constraint.grammar(GBNF), ["1", "12,(3,(4)),5", "((0))"], ["()", "1,,2", ",1", "(1))"], is_list),
]


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Backends:
    return Backends(vocabulary)


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CASES, ids=[case.name for case in CASES])
def case(request: pytest.FixtureRequest, backend: str) -> Case:
    chosen: Case = request.param
    if chosen.constraint.kind not in BACKENDS[backend].kinds:
        pytest.skip(f"{backend} has no {chosen.constraint.kind}")
    return chosen


_compiled: dict[tuple[str, str, str], CompiledGrammar] = {}


@pytest.fixture
def grammar(backends: Backends, backend: str, case: Case) -> CompiledGrammar:
    key = (backends.vocabulary.fingerprint, backend, case.constraint.key)
    if key not in _compiled:
        try:
            _compiled[key] = backends[backend].compile(case.constraint)
        except UnsupportedConstraint as refusal:
            if case.name == "lark":  # the one notation that a backend with grammars may lack
                pytest.skip(str(refusal))
            raise
    return _compiled[key]


def mask(matcher: Matcher, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the allowed text tokens. The row is filled before: every word must be written."""
    row = np.full(words(vocabulary.padded_vocab_size), -1, dtype=np.int32)
    matcher.fill_bitmask(row)
    return np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)


def stop(vocabulary: Vocabulary) -> int:
    return vocabulary.stop_token_ids[0]


def test_adapters_have_their_registered_names(backend: str) -> None:
    adapter = BACKENDS[backend]
    loaded = adapter.load()
    assert loaded.name == backend
    assert adapter.kinds <= set(KINDS)


def spell(matcher: Matcher, text: bytes, vocabulary: Vocabulary) -> None:
    """Generate `text` with allowed tokens only: the tokenizer's own, unless the mask allows only another one."""
    while text:
        allowed = mask(matcher, vocabulary)
        token = vocabulary.encode(text)[0]
        if token not in allowed:
            # If a text is forced, a backend may allow only one token to start it.
            assert len(allowed) == 1, (text, [vocabulary.token_bytes[other] for other in allowed])
            token = int(allowed[0])
        matcher.accept_tokens([token])
        assert text.startswith(vocabulary.token_bytes[token]), (text, vocabulary.token_bytes[token])
        text = text[len(vocabulary.token_bytes[token]) :]
        assert not matcher.is_terminated()


def test_valid_texts_can_be_generated(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    for text in case.valid:
        matcher = grammar.matcher()
        spell(matcher, text.encode(), vocabulary)
        assert matcher.is_accepting(), text
        matcher.accept_tokens([stop(vocabulary)])
        assert matcher.is_terminated()
        assert matcher.forced_tokens() == []
        with pytest.raises(TokenRejected):
            matcher.accept_tokens(vocabulary.encode("a"))


def test_any_split_into_tokens_is_accepted(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    """Accept texts byte by byte, also within characters: the constraint is on bytes, not on one tokenization."""
    single = {content: token for token, content in enumerate(vocabulary.token_bytes) if len(content) == 1}
    for text in case.valid:
        matcher = grammar.matcher()
        for index in range(len(text.encode())):
            matcher.accept_tokens([single[text.encode()[index : index + 1]]])
            assert matcher.is_accepting() or len(mask(matcher, vocabulary))
        assert matcher.is_accepting(), text


def test_accepting_exactly_where_satisfied(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    for text in case.valid:
        matcher = grammar.matcher()
        consumed = b""
        for token in [None, *vocabulary.encode(text)]:
            if token is not None:
                matcher.accept_tokens([token])
                consumed += vocabulary.token_bytes[token]
            if matcher.is_accepting():
                assert case.satisfied(consumed.decode()), consumed
            else:
                with pytest.raises(TokenRejected):
                    matcher.fork().accept_tokens([stop(vocabulary)])
    for text in case.valid:
        matcher = grammar.matcher()
        matcher.accept_tokens([*vocabulary.encode(text), stop(vocabulary)])
        assert matcher.is_terminated()


def test_invalid_texts_are_stopped(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    for text in case.invalid:
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(vocabulary.encode(text))
        except TokenRejected:
            continue
        assert not matcher.is_accepting(), text


def test_mask_and_accept_agree(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    matcher = grammar.matcher()
    for token in vocabulary.encode(case.valid[0])[:6]:
        allowed = set(mask(matcher, vocabulary).tolist())
        accepted = set()
        for other in vocabulary.text_token_ids:
            fork = matcher.fork()
            try:
                fork.accept_tokens([other])
                accepted.add(other)
            except TokenRejected:
                pass
        # If a text is forced, a mask may allow one tokenization only, while `accept_tokens` takes others too.
        assert allowed == accepted or (len(allowed) == 1 and allowed < accepted)
        matcher.accept_tokens([token])


@pytest.mark.parametrize("token", [-1, 639, 640, 10**9, 0, 3])
def test_no_such_token(grammar: CompiledGrammar, token: int) -> None:
    """The token is outside the vocabulary, in the padding, or special."""
    with pytest.raises(TokenRejected):
        grammar.matcher().accept_tokens([token])


def test_rollback_is_replay(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    for text in case.valid:
        tokens = [*vocabulary.encode(text), stop(vocabulary)]
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens)
        for count in (1, 2, 3):
            if count > len(tokens):
                break
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
            replay = grammar.matcher()
            replay.accept_tokens(tokens)
            assert not matcher.is_terminated()
            assert matcher.is_accepting() == replay.is_accepting()
            assert np.array_equal(mask(matcher, vocabulary), mask(replay, vocabulary))
        matcher.rollback(0)
        matcher.rollback(len(tokens))
        assert np.array_equal(mask(matcher, vocabulary), mask(grammar.matcher(), vocabulary))
        matcher.accept_tokens([*vocabulary.encode(text), stop(vocabulary)])
        assert matcher.is_terminated()


def test_accepts_counts_tokens_and_changes_nothing(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    for text in case.valid:
        tokens = [*vocabulary.encode(text), stop(vocabulary)]
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens[: len(tokens) // 2])
        rest = tokens[len(tokens) // 2 :]
        before = mask(matcher, vocabulary)
        assert matcher.accepts(rest) == len(rest)
        assert matcher.accepts([*rest, rest[0]]) == len(rest)
        assert np.array_equal(mask(matcher, vocabulary), before)


def test_forks_go_their_own_ways(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode(case.valid[0])
    for cut in {0, len(tokens) // 2, len(tokens)}:
        parent = grammar.matcher()
        parent.accept_tokens(tokens[:cut])
        before = mask(parent, vocabulary)
        child = parent.fork()
        child.accept_tokens([*tokens[cut:], stop(vocabulary)])
        assert child.is_terminated()
        assert not parent.is_terminated()
        assert np.array_equal(mask(parent, vocabulary), before)
        parent.accept_tokens(tokens[cut:])
        child.rollback(len(tokens) - cut + 1)
        assert np.array_equal(mask(child, vocabulary), before)


def test_forced_tokens_are_forced(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    """A forced continuation is allowed, and every allowed token is consistent with it."""
    for text in case.valid:
        matcher = grammar.matcher()
        for token in vocabulary.encode(text):
            forced = matcher.forced_tokens()
            if forced:
                assert not matcher.is_accepting()
                matcher.fork().accept_tokens(forced)
                expected = vocabulary.decode(forced)
                for other in mask(matcher, vocabulary):
                    content = vocabulary.token_bytes[other]
                    assert expected.startswith(content) or content.startswith(expected), (expected, content)
            matcher.accept_tokens([token])


def test_a_fresh_backend_loads_what_was_dumped(
    grammar: CompiledGrammar, case: Case, backend: str, vocabulary: Vocabulary
) -> None:
    dumped = grammar.dump()
    loaded = Backends(Vocabulary.from_bytes(vocabulary.to_bytes()))[backend].load(case.constraint, dumped)
    left, right = grammar.matcher(), loaded.matcher()
    for token in vocabulary.encode(case.valid[0]):
        assert np.array_equal(mask(left, vocabulary), mask(right, vocabulary))
        left.accept_tokens([token])
        right.accept_tokens([token])
    assert left.is_accepting()
    assert right.is_accepting()
    assert loaded.nbytes > 0


def walk(matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, limit: int) -> bytes | None:
    """Generate random allowed tokens until a stop token; None after `limit` tokens."""
    text = b""
    for _ in range(limit):
        accepting = matcher.is_accepting()
        allowed = mask(matcher, vocabulary)
        assert accepting or len(allowed), text
        if accepting and (not len(allowed) or generator.random() < 0.4):
            matcher.accept_tokens([stop(vocabulary)])
            return text
        # Within strings, structural tokens are rare: prefer them, so that walks end.
        structural = [token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],0']
        choices = structural if structural and generator.random() < 0.6 else allowed
        token = int(generator.choice(choices))
        matcher.accept_tokens([token])
        text += vocabulary.token_bytes[token]
    return None


def test_random_walks_satisfy(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    generator = random.Random(7)
    ended = 0
    for _ in range(12):
        text = walk(grammar.matcher(), vocabulary, generator, 120)
        if text is not None:
            ended += 1
            # xgrammar's free text is any bytes, as unconstrained text is.
            errors = "replace" if case.constraint.kind == "structural_tag" else "strict"
            assert case.satisfied(text.decode(errors=errors)), text
    assert ended


def test_the_worker_lets_no_special_token_through(grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary) -> None:
    worker = MaskWorker(vocabulary)
    worker.install("key", grammar)
    tokens = vocabulary.encode(case.valid[0])
    bitmask = np.full((1, words(vocabulary.padded_vocab_size)), -1, dtype=np.int32)
    never = set(range(vocabulary.padded_vocab_size)) - set(vocabulary.permitted_token_ids)
    worker.open(1, "key")
    for position in range(len(tokens) + 1):
        assert worker.fill(1, tokens[max(position - 1, 0) : position], bitmask[0]) is None
        allowed = set(allowed_ids(bitmask[0]).tolist())
        assert not allowed & never
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens[:position])
        assert (stop(vocabulary) in allowed) == matcher.is_accepting()


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}])
def test_a_model_that_repeats_digits_comes_to_an_end(
    backends: Backends, backend: str, vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    """A long number ends, while the digits of a string may be required."""
    for wanted in (schema, {"enum": ["1" * 60]}):
        worker = MaskWorker(vocabulary)
        worker.install("key", backends[backend].compile(Constraint.json_schema(wanted)))
        worker.open(1, "key")
        row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        output: list[int] = []
        while stop(vocabulary) not in output:
            assert worker.fill(1, output[-1:], row) is None
            allowed = allowed_ids(row).tolist()
            digits = [token for token in allowed if vocabulary.token_bytes[token].isdigit()]
            ends = [token for token in (stop(vocabulary), *vocabulary.encode("]")) if token in allowed]
            output.append([*digits[::-1], *ends, *allowed][0])
            assert len(output) < 200
        assert is_json(vocabulary.decode(output).decode(), wanted)


def test_compact_whitespace(backends: Backends, backend: str, vocabulary: Vocabulary) -> None:
    compact = backends[backend].compile(Constraint.json_schema(PERSON, whitespace="")).matcher()
    with pytest.raises(TokenRejected):
        compact.fork().accept_tokens(vocabulary.encode('{"name": "Ada"'))
    compact.accept_tokens(vocabulary.encode('{"name":"A da","age":36,"tags":["math"]}'))
    assert compact.is_accepting()


def test_whitespace_as_json_is_usually_written(backends: Backends, backend: str, vocabulary: Vocabulary) -> None:
    usual = backends[backend].compile(Constraint.json_schema(PERSON))
    document = {"name": "A da", "age": 36, "tags": ["math"]}
    layouts: list[dict[str, Any]] = [{}, {"separators": (",", ":")}]
    if backend != "outlines":  # its regex allows one space or none: line breaks would make the automaton much larger
        layouts += [{"indent": 2}, {"indent": "\t"}]
    for layout in layouts:
        matcher = usual.matcher()
        matcher.accept_tokens(vocabulary.encode(json.dumps(document, **layout)))
        assert matcher.is_accepting()
    with pytest.raises(TokenRejected):
        usual.matcher().accept_tokens(vocabulary.encode('{"name":' + " " * 60 + '"Ada"'))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex("(unclosed"),
        Constraint.regex("a(?=b)"),
        Constraint.regex(r"(a)\1"),
        Constraint.json_schema({"type": "string", "pattern": "(?=a)b"}),
        Constraint.json_schema({"type": "string", "pattern": "^{2}times$"}),
        Constraint.json_schema({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}),
        Constraint.grammar("start: undefined_rule"),
        Constraint.grammar("root ::= undefined"),
        Constraint.grammar("this is no grammar"),
    ],
    ids=lambda constraint: constraint.source,
)
def test_what_cannot_be_enforced_is_refused(backends: Backends, backend: str, constraint: Constraint) -> None:
    """A malformed or unsupported constraint is an InvalidConstraint: not an internal error, and never ignored."""
    if constraint.kind not in BACKENDS[backend].kinds:
        pytest.skip(f"{backend} has no {constraint.kind}")
    try:
        grammar = backends[backend].compile(constraint)
    except InvalidConstraint as refusal:
        assert refusal.param == constraint.kind  # noqa: PT017
    else:
        # Some backends support it: then they enforce it.
        assert "not" in constraint.source or "(?=a)" in constraint.source
        matcher = grammar.matcher()
        with pytest.raises(TokenRejected):
            matcher.accept_tokens(backends.vocabulary.encode('{"a":"x"}'))


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "number"},
            {"type": "string"},
            {"type": "string", "maxLength": 3},
            {"type": "string", "minLength": 2},
            {"type": "string", "enum": ["red", "green"]},
            {"type": "string", "pattern": "^[a-c]+$"},
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: {
                "type": "object",
                "properties": {f"p{index}": part for index, part in enumerate(parts)},
                "required": [f"p{index}" for index in range(len(parts))],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=4,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_schemas(backends: Backends, backend: str, vocabulary: Vocabulary, schema: Any, seed: int) -> None:
    try:
        grammar = backends[backend].compile(Constraint.json_schema(schema))
    except UnsupportedConstraint:
        return
    text = walk(grammar.matcher(), vocabulary, random.Random(seed), 60)
    assert text is None or is_json(text.decode(), schema), text
