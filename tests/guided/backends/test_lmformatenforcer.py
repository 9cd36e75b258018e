"""Tests specific to lm-format-enforcer: invalid JSON that it accepts, and keywords that it ignores."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import BYTES

from guided.backends.character_tokens import CharacterTokens, Columns
from guided.backends.lmformatenforcer import LMFormatEnforcerBackend
from guided.backends.lmformatenforcer_json import JsonAutomaton, JsonState
from guided.backends.lmformatenforcer_schema import lower
from guided.backends.mask_cache import MaskCache
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.schema import json_syntax
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> LMFormatEnforcerBackend:
    return LMFormatEnforcerBackend(vocabulary)


def accepts(backend: LMFormatEnforcerBackend, vocabulary: Vocabulary, schema: Any, text: str) -> bool:
    matcher = backend.compile(Constraint("json_schema", json.dumps(schema))).matcher()
    try:
        matcher.accept_tokens(vocabulary.encode(text))
    except TokenRejected:
        return False
    return matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}}, '{"a":1,}'),
        ({"type": "array", "items": {"type": "integer"}}, "[1,]"),
        ({"type": "number"}, "1.e5"),
        ({"type": "integer"}, "1e-5"),
        ({"type": "integer"}, "-0.5"),
        ({"type": "string"}, '"a\tb"'),
        ({"type": "string", "minLength": 2}, '"\\ud83d\\ude00"'),
        ({"type": "string", "maxLength": 0}, '"a"'),
        ({"type": "object"}, "{} "),
        ({"type": "object"}, " {}"),
        ({"type": "array", "maxItems": 2}, "[1,2,3]"),
    ],
    ids=str,
)
def test_what_the_library_takes_and_we_do_not(
    backend: LMFormatEnforcerBackend, vocabulary: Vocabulary, schema: Any, text: str
) -> None:
    assert not accepts(backend, vocabulary, schema, text)


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"type": "string", "format": "date"}, "format", "/format"),
        ({"type": "integer", "minimum": 3}, "minimum", "/minimum"),
        ({"type": "number", "exclusiveMinimum": 0}, "exclusiveMinimum", "/exclusiveMinimum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
        ({"type": "array", "prefixItems": [{}]}, "prefixItems", "/prefixItems"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}]}, "prefixItems", "/prefixItems"),
        ({"type": "array", "items": False}, "items", "/items"),
        ({"type": "object", "minProperties": 1}, "minProperties", "/minProperties"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties", "/patternProperties"),
        ({"properties": {"x~/y": {"type": "string", "not": {"pattern": "a"}}}}, "not", "/properties/x~0~1y/not"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "allOf", "/allOf"),
        ({"anyOf": [{"type": "string"}, {"multipleOf": 2}]}, "multipleOf", "/anyOf/1/multipleOf"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "minLength", "/minLength"),
        ({"type": "object", "properties": {'q"': {}}}, "properties", "/properties"),
        ({"enum": ["a\n"]}, "enum", "/enum"),
        ({"enum": [True]}, "enum", "/enum"),
        ({"const": {"a": 1}}, "const", "/const"),
        ({"$defs": {"a": {"format": "date"}}, "items": {"$ref": "#/$defs/a"}}, "format", "/$defs/a/format"),
    ],
    ids=json.dumps,
)
def test_what_it_would_ignore_is_refused_by_name(
    backend: LMFormatEnforcerBackend, schema: Any, keyword: str, pointer: str
) -> None:
    with pytest.raises(UnsupportedConstraint, match=f"'{keyword}'") as caught:
        backend.compile(Constraint("json_schema", json.dumps(schema)))
    assert caught.value.pointer == pointer
    assert caught.value.param == "json_schema"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"title": "anything"},
        {"type": ["integer", "null", "string"], "minLength": 2},
        {"minLength": 2},
        {"enum": ["red", 1, 2.5, None, "grün"]},
        {"enum": ["red", "green"], "maxLength": 3},
        {"const": "only"},
        {"type": "boolean", "enum": [True, False]},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {"type": "null"}]},
        {
            "anyOf": [
                {"type": "object", "properties": {k: {"type": "string"}}, "required": [k]} for k in ("left", "right")
            ]
        },
        {
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": False},
        {"type": "string", "pattern": "^ ?[ab]$"},
        {"enum": [" a", "  b", "c"]},
        {"type": "string", "pattern": "^[a-c]{2,}-\\d?$"},
        {"type": "string", "pattern": "é|[^a-z]x"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        {"type": "array", "minItems": 1},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "number"},
        {"allOf": [{"type": "integer"}]},
        {"allOf": [{"type": "string"}, {"minLength": 2}]},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "boolean"}], "maxLength": 2},
        {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}},
        {"properties": {"a": {"type": "null"}}, "patternProperties": {"^b": {"type": "null"}}, "type": "object"},
    ],
    ids=json.dumps,
)
def test_rewritten_schemas_mean_the_same(backend: LMFormatEnforcerBackend, vocabulary: Vocabulary, schema: Any) -> None:
    """Random walks end in instances of the original schema."""
    grammar = backend.compile(Constraint("json_schema", json.dumps(schema)))
    generator = random.Random(3)
    ended = 0
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for _ in range(15):
        matcher, text = grammar.matcher(), b""
        for _ in range(60):
            matcher.fill_bitmask(row)
            allowed = allowed_ids(row)
            if matcher.is_accepting() and (not len(allowed) or generator.random() < 0.3):
                document = json.loads(text.decode())
                jsonschema.validate(document, schema)
                ended += 1
                break
            assert len(allowed), text
            ends = [token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],']
            token = int(generator.choice(ends if ends and generator.random() < 0.6 else allowed))
            matcher.accept_tokens([token])
            text += vocabulary.token_bytes[token]
    assert ended


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"}},
            '{"j":1,"k":2}',
            '{"j":1}',
        ),
        ({"type": "string", "maxLength": 2}, '"  "', '"   "'),
        ({"type": "string", "pattern": "^ a$"}, '" a"', '"  a"'),
        ({"enum": [" a"]}, '" a"', '"a"'),
        ({"type": "string", "minLength": 2}, '"\\n\\u00e9"', '"\\u00e9"'),
    ],
    ids=str,
)
def test_to_the_letter(
    backend: LMFormatEnforcerBackend, vocabulary: Vocabulary, schema: Any, good: str, bad: str
) -> None:
    assert accepts(backend, vocabulary, schema, good)
    assert not accepts(backend, vocabulary, schema, bad)


def test_nothing_satisfies(backend: LMFormatEnforcerBackend) -> None:
    for schema in (
        False,
        {"type": "string", "enum": [1]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
    ):
        with pytest.raises(InvalidConstraint, match="no value satisfies") as caught:
            backend.compile(Constraint("json_schema", json.dumps(schema)))
        assert not isinstance(caught.value, UnsupportedConstraint)


def test_a_schema_that_is_nothing_but_itself_is_refused(backend: LMFormatEnforcerBackend) -> None:
    schema = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    with pytest.raises(InvalidConstraint, match="no finite value"):
        backend.compile(Constraint("json_schema", json.dumps(schema)))


def test_the_schema_is_left_as_it_was() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["b"]}
    before = json.dumps(schema)
    assert lower(schema).literals == {"a", "b", "x"}
    assert json.dumps(schema) == before


def test_what_the_library_raises_is_a_backend_error(
    backend: LMFormatEnforcerBackend, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own enforcer logs it and allows end-of-sequence only."""
    matcher = backend.compile(Constraint.json_schema({"type": "object", "properties": {"q": {}}})).matcher()
    matcher.accept_tokens(vocabulary.encode('{"'))

    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("lmformatenforcer.jsonschemaparser.JsonSchemaParser.add_character", broken)
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    with pytest.raises(BackendError, match="KeyError"):
        matcher.fill_bitmask(row)
    with pytest.raises(BackendError, match="KeyError"):
        matcher.accept_tokens(vocabulary.encode("q"))


def test_equal_states_share_a_mask(vocabulary: Vocabulary) -> None:
    masks = MaskCache()
    backend = LMFormatEnforcerBackend(vocabulary, masks)
    matcher = backend.compile(Constraint.json_schema({"type": "array", "items": {"type": "string"}})).matcher()
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for text in ('["some', " words", " more"):
        matcher.accept_tokens(vocabulary.encode(text))
        matcher.fill_bitmask(row)
    assert masks.nbytes == row.nbytes


@pytest.mark.parametrize(
    "constraint",
    [
        *map(Constraint.regex, (r"[^\x00-\uffff]", r"[^\x00-\u0fff]{2}", r"[^\x00-\ud7ff]", r"[\ue000-\uffff]")),
        Constraint.choice(["\ue000", "a"]),
        Constraint.json_schema({"type": "string", "pattern": "^[^\x01-\u0fff]$"}),
    ],
    ids=str,
)
def test_characters_byte_by_byte(constraint: Constraint) -> None:
    """The first bytes of a character are allowed where one with these bytes is, and only there."""
    grammar = LMFormatEnforcerBackend(BYTES).compile(constraint)
    row = np.zeros(words(BYTES.padded_vocab_size), dtype=np.int32)
    for seed in range(40):
        matcher, chosen, generator = grammar.matcher(), bytearray(), random.Random(seed)
        while not matcher.is_accepting():
            matcher.fill_bitmask(row)
            token = generator.choice(allowed_ids(row).tolist())
            chosen.append(BYTES.token_bytes[token][0])
            matcher.accept_tokens([token])
        text = chosen.decode()
        if constraint.kind == "regex":
            assert re.fullmatch(constraint.source, text)
        elif constraint.kind == "choice":
            assert text in constraint.choices
        else:
            assert json.loads(text) == "\0" or json.loads(text) > "\u0fff"


def test_columns_run_a_table_over_all_texts() -> None:
    texts = ["ab", "", "abc", "b", "ba"]
    columns = Columns([(text, b"") for text in texts])
    table = np.array([[1, 3, 3], [3, 2, 3], [3, 3, 0], [3, 3, 3]], dtype=np.int32)  # (abc)*
    ends = columns.run(table, np.arange(3, dtype=np.int32), 0, 3)
    assert dict(zip([texts[index] for index in columns.order], ends.tolist(), strict=True)) == {
        "ab": 2,
        "": 0,
        "abc": 0,
        "b": 3,
        "ba": 3,
    }


def test_tokens_within_strings(vocabulary: Vocabulary) -> None:
    strings = CharacterTokens(vocabulary).strings
    told = dict(zip(strings.tokens.tolist(), zip(strings.lengths, strings.rests, strict=True), strict=True))
    by_bytes = {content: token for token, content in enumerate(vocabulary.token_bytes) if content}
    assert told[by_bytes[b"a"]] == (1, -1)
    assert strings.rest_tree.tokens == (told[by_bytes[b'"']][1],)
    assert strings.rest_tree.children[":"].tokens == (told[by_bytes[b'":']][1],)
    assert told[by_bytes[b"\xe7"]] == (1, -1)  # the first byte of a character that counts
    assert by_bytes[b"\n"] not in told


SPACED: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 10, "x"]}}},
    {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "null"}}]}},
    {"type": "object", "additionalProperties": {"type": ["boolean", "string"]}},
]


@pytest.mark.parametrize("schema", SPACED, ids=str)
def test_whitespace_leads_to_the_same_whichever_it_is(vocabulary: Vocabulary, schema: Any) -> None:
    automaton = JsonAutomaton(lower(schema), CharacterTokens(vocabulary), spaces=True)
    found = 0
    for seed in range(8):
        generator = random.Random(seed)
        state: JsonState | None = automaton.start
        for _ in range(25):
            if state is None or not state.allowed:
                break
            if not json_syntax.in_string(state.syntax) and "\\" not in state.syntax[1]:
                spaced = [automaton.step(state, character) for character in " \n\t\r"]
                seen = [None if each is None else (each.allowed, automaton.mask(each).tobytes()) for each in spaced]
                assert seen == seen[:1] * 4
                found += spaced[0] is not None
            state = automaton.step(state, generator.choice(sorted(automaton.following(state)) or [" "]))
    assert found > 20
