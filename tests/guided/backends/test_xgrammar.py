"""Tests specific to xgrammar: keywords that it ignores, and characters that it should
not allow."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, accepts
from contract_cases import mask

from guided.backends.xgrammar import adapter as xgrammar_module
from guided.backends.xgrammar.adapter import XGrammarBackend
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(BYTES)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{2}[^a-z][a-z]",
        r"\w{2}\W\w",
        r"a+\d狐",
        r"A?[^\x20-\uffff]\n",
        r"\p{L}{2}\P{L}",
        r"[^a]{1,3}b",
    ],
)
def test_a_mask_allows_only_what_is_accepted(
    vocabulary: Vocabulary, pattern: str
) -> None:
    """xgrammar 0.2.8 computes wrong masks for a class with several ranges beyond ASCII
    behind a repetition."""
    grammar = XGrammarBackend(vocabulary).compile(Constraint.regex(pattern))
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    grammar.matcher().fill_bitmask(row)
    for token in allowed_ids(row).tolist():
        grammar.matcher().accept_tokens([token])


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"type": "array", "not": {"uniqueItems": True}}, "not", "/not"),
        ({"type": "array", "contains": {"const": 1}}, "contains", "/contains"),
        (
            {"type": "integer", "multipleOf": 7, "minimum": 3},
            "multipleOf",
            "/multipleOf",
        ),
        ({"type": "integer", "maximum": 2**63}, "maximum", "/maximum"),
        ({"type": "string", "format": "uri", "pattern": "x"}, "pattern", "/pattern"),
        (
            {"type": "string", "pattern": "^a+b+$", "maxLength": 5},
            "maxLength",
            "/pattern",
        ),
        (
            {"patternProperties": {"^a": {"type": "null"}}},
            "patternProperties",
            "/patternProperties",
        ),
        ({"type": "object", "minProperties": 1}, "minProperties", "/minProperties"),
    ],
)
def test_what_it_would_ignore_is_refused_by_name(
    backend: XGrammarBackend, schema: Any, keyword: str, pointer: str | None
) -> None:
    for inside, place in (
        (schema, ""),
        ({"type": "object", "properties": {"p": schema}}, "/properties/p"),
    ):
        with pytest.raises(UnsupportedConstraint, match=keyword) as caught:
            backend.compile(Constraint.json_schema(inside, strict_schema=True))
        if pointer is not None:
            assert caught.value.pointer == place + pointer


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # its own automata for patterns let half of an optional group in
        (
            {"type": "string", "pattern": "^(a+b)?$"},
            ["", "ab", "aab"],
            ["a", "aa", "b", "abab"],
        ),
        (
            {"type": "string", "pattern": '^a"\\n\\\\b?$'},
            ['a"\n\\b', 'a"\n\\'],
            ['a"\n', "a"],
        ),
        (
            {"type": "string", "format": "date"},
            ["2024-02-29"],
            ["2023-02-29", "2024-02-31", "2024-1-1"],
        ),
        (
            {"type": "string", "format": "time"},
            ["00:06:50Z", "00:06:50.8Z"],
            ["00:06:508Z"],
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "null"}, {"type": "boolean"}],
                "minItems": 1,
                "maxItems": 3,
            },
            [[None], [None, True], [None, True, "x"]],
            [[], [None, 1], [None, True, 1, 1]],
        ),
        # lengths that xgrammar says in other words
        ({"type": "string", "maxLength": 1}, ["", "a"], ["ab", "\x01"]),
        # names that JSON escapes: it would allow them as other names
        ({"properties": {'a"': {"type": "null"}}}, [{}, {'a"': None}], [{'a"': 1}]),
    ],
)
def test_what_it_would_ignore_and_does_not_any_more(
    backend: XGrammarBackend, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    grammar = backend.compile(Constraint.json_schema(schema))
    assert [
        value for value in (*valid, *invalid) if accepts(grammar, json.dumps(value))
    ] == valid


def test_a_name_has_one_spelling_where_others_are_allowed(
    backend: XGrammarBackend,
) -> None:
    properties = {"a": {"type": "null"}, "b/c": {"type": "null"}}
    grammar = backend.compile(
        Constraint.json_schema({"type": "object", "properties": properties})
    )
    assert accepts(grammar, '{"a": null, "x": "\\n\\""}')
    for text in ('{"\\u0061": 1}', '{"b\\/c": 1}', '{"a": null, "a": 1}'):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("keywords", [{}, {"minLength": 1}, {"pattern": "."}])
@pytest.mark.parametrize(
    ("lead", "forbidden"),
    [(0xE0, range(0x80, 0xA0)), (0xED, range(0xA0, 0xC0)), (0xF0, range(0x80, 0x90))],
)
def test_masks_keep_to_utf8(
    backend: XGrammarBackend, keywords: Any, lead: int, forbidden: range
) -> None:
    state = backend.compile(
        Constraint.json_schema({"type": "string", **keywords})
    ).matcher()
    state.accept_tokens([ord('"') + 1, lead + 1])
    row = np.full(words(BYTES.padded_vocab_size), -1, dtype=np.int32)
    state.fill_bitmask(row)
    after = {token - 1 for token in allowed_ids(row)} & set(range(256))
    assert after == set(range(0x80, 0xC0)) - set(forbidden)
    assert not state.accepts([forbidden[0] + 1])
    state.accept_tokens([min(after) + 1])
    state.rollback(1)
    state.fill_bitmask(row)
    assert {token - 1 for token in allowed_ids(row)} & set(range(256)) == after


def test_what_compiles_quickly_is_not_serialised(
    backend: XGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint.json_schema({"type": "string", "maxLength": 3})
    compiled = backend.compile(constraint)
    assert compiled.dump() == b""
    monkeypatch.setattr(xgrammar_module, "QUICK_SECONDS", 0.0)
    for dumped in (b"", compiled.dump()):
        grammar = XGrammarBackend(BYTES).load(constraint, dumped)
        assert accepts(grammar, '"abc"')
        assert not accepts(grammar, '"abcd"')
    assert compiled.dump()


@pytest.mark.parametrize(
    "grammar", ["start: (start)?", 'start: "x" a?\na: b?\nb: a?', "start: start"]
)
def test_rules_without_any_text_are_refused(
    backend: XGrammarBackend, grammar: str
) -> None:
    """Such a rule would crash its process."""
    with pytest.raises(UnsupportedConstraint, match="derives nothing but itself"):
        backend.compile(Constraint.grammar(grammar))


@pytest.mark.parametrize(
    "classes",
    ["[^a] [一-鿿]", "[b-zé] [一-鿿]", "[^a]{2} [à-ÿ]", "[^0-9] [😀-😏] [^x]"],
)
def test_what_a_mask_allows_beside_other_alphabets_is_accepted(
    classes: str, vocabulary: Vocabulary
) -> None:
    grammar = XGrammarBackend(vocabulary).compile(
        Constraint.grammar(f'root ::= "x" {classes} "1"')
    )
    start = grammar.matcher()
    start.accept_tokens(vocabulary.encode("x"))
    for token in mask(start, vocabulary).tolist():
        matcher = start.fork()
        matcher.accept_tokens([token])
        assert all(
            matcher.accepts([after]) for after in mask(matcher, vocabulary).tolist()
        )
