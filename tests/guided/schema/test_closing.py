"""Objects that name their properties are closed, as a whole, and what is left satisfies
the schema as sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS, accepts, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.schema.canonical import canonical

DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


def model(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TREE = model(value=NUMBER, left={"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]})
BASE = {"$defs": {"Base": {**model(id=NUMBER), "required": ["id"]}}}
SHAPES = [
    {**model(kind={"const": kind}, at=model(x=NUMBER)), "required": ["kind"]}
    for kind in "abcde"
]
PAYMENT = {
    **model(by={"enum": ["card", "cash"]}),
    "required": ["by"],
    "if": {"properties": {"by": {"const": "card"}}},
    "then": {"properties": {"card": TEXT}},
    "else": {"properties": {"change": NUMBER}},
}
BY_KIND = [
    {
        "if": {"properties": {"k": {"const": kind}}},
        "then": {"properties": {f"of_{kind}": TEXT}},
    }
    for kind in "abcdefgh"
]
THENS = [f"/allOf/{index}/then" for index in range(len(BY_KIND))]
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any], list[str]]] = {
    "plain": (model(a=NUMBER), [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}], [""]),
    "without any": (model(), [{}], [{"a": 1}], [""]),
    "unnamed": ({"type": "object"}, [{"a": 1}], [], []),
    "open": (
        {**model(a=NUMBER), "additionalProperties": True},
        [{"a": 1, "b": 1}],
        [],
        [],
    ),
    "unevaluated": (
        {**model(a=NUMBER), "unevaluatedProperties": NUMBER},
        [{"a": 1, "b": 1}],
        [{"b": "x"}],
        [],
    ),
    "and patterns": (
        {**model(a=NUMBER), "patternProperties": {"^x": TEXT}},
        *([{"a": 1, "xy": "t"}], [{"y": "t"}], [""]),
    ),
    "patterns": (
        {"patternProperties": {"^x": TEXT}, "type": "object"},
        [{"y": 1}],
        [{"x": 1}],
        [],
    ),
    "undeclared": (
        {**model(a=NUMBER), "required": ["a", "b"]},
        *([{"a": 1, "b": [1]}], [{"a": 1, "b": 1, "c": 1}], [""]),
    ),
    "items": (
        {"items": model(a=NUMBER), "type": "array"},
        [[{"a": 1}]],
        [[{"b": 1}]],
        ["/items"],
    ),
    "recursive": (
        {"$ref": "#/$defs/Tree", "$defs": {"Tree": TREE}},
        *(
            [{"value": 1, "left": {"value": 2}}],
            [{"left": {"right": None}}],
            ["/$defs/Tree"],
        ),
    ),
    "allOf": (
        {**BASE, "allOf": [{"$ref": "#/$defs/Base"}, model(name=TEXT)]},
        *([{"id": 1, "name": "n"}], [{"id": 1, "x": 1}], ["/$defs/Base", "/allOf/1"]),
    ),
    "beside $ref": (
        {**BASE, "$ref": "#/$defs/Base", **model(name=TEXT)},
        *([{"id": 1, "name": "n"}], [{"id": 1, "x": 1}], ["", "/$defs/Base"]),
    ),
    "anyOf": (
        {"anyOf": [model(a=NUMBER), model(b=TEXT)]},
        *(
            [{"a": 1}, {"b": "t"}],
            [{"c": 1}, {"a": "x"}, {"a": 1, "b": "t"}],
            ["/anyOf/0", "/anyOf/1"],
        ),
    ),
    "one of two required": (
        {**model(a=TEXT, b=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        *([{"a": "x"}, {"a": "x", "b": "y"}], [{}, {"a": "x", "c": 1}], [""]),
    ),
    "if": (
        PAYMENT,
        *(
            [{"by": "card", "card": "1"}, {"by": "cash", "change": 2}],
            [{"by": "cash", "card": "1"}],
            ["", "/then", "/else"],
        ),
    ),
    "if in draft 7": (
        DRAFT_7 | PAYMENT,
        *(
            [{"by": "card", "card": "1"}, {"by": "cash", "change": 2}],
            [{"by": "cash", "card": "1"}],
            ["", "/then", "/else"],
        ),
    ),
    "dependentSchemas": (
        {**model(a=NUMBER), "dependentSchemas": {"a": model(b=TEXT)}},
        *(
            [{"a": 1, "b": "x"}],
            [{"b": 1}, {"a": 1, "c": 1}],
            ["", "/dependentSchemas/a"],
        ),
    ),
    "dependencies": (
        {**DRAFT_7, **model(a=NUMBER), "dependencies": {"a": model(b=TEXT)}},
        *([{"a": 1, "b": "x"}], [{"a": 1, "c": 1}], ["", "/dependencies/a"]),
    ),
    "used alone and in allOf": (
        {
            **BASE,
            **model(
                one={"$ref": "#/$defs/Base"},
                two={"allOf": [{"$ref": "#/$defs/Base"}, model(n=TEXT)]},
            ),
        },
        [{"one": {"id": 1}, "two": {"id": 1, "n": "x"}}],
        [{"one": {"id": 1, "n": "x"}}, {"two": {"id": 1, "m": 1}}],
        ["", "/$defs/Base", "/properties/two/allOf/1"],
    ),
    "many alternatives, each on its own": (
        {"oneOf": SHAPES},
        [{"kind": "c", "at": {"x": 1}}],
        [{"kind": "c", "at": {"y": 1}}, {"kind": "c", "more": 1}],
        [
            place
            for index in range(5)
            for place in (f"/oneOf/{index}", f"/oneOf/{index}/properties/at")
        ],
    ),
    "many conditions, the names of all": (
        {**model(k={"enum": list("abcdefgh")}), "required": ["k"], "allOf": BY_KIND},
        *(
            [{"k": "a", "of_a": "x"}],
            [{"k": "a", "other": 1}, {"k": "a", "of_a": 1}],
            ["", *THENS],
        ),
    ),
    "not": (
        {
            **model(a=NUMBER),
            "not": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        },
        *([{"a": 2}], [{"a": 1}, {"b": 1}], [""]),
    ),
    "contains": (
        {"type": "array", "contains": {**model(a=NUMBER), "required": ["a"]}},
        *([[{"a": 1, "b": 1}]], [[{}]], ["/contains"]),
    ),
    "no value would be left": (
        {**model(a=NUMBER), "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{"a": 1}],
        [""],
    ),
}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("schema", "good", "bad", "closed"), CASES.values(), ids=CASES)
def test_closed(
    backend: str, schema: Any, good: list[Any], bad: list[Any], closed: list[str]
) -> None:
    constraint = Constraint.json_schema(schema, open_objects=False)
    assert list(constraint.closed) == closed
    grammar = Backends(BYTES)[backend].compile(constraint)
    for value in good:
        assert writable(grammar, value), value
    for value in bad if backend == "llguidance" or not grammar.checked else ():
        assert not writable(grammar, value), value
    assert Constraint.json_schema(schema).closed == ()


def writable(grammar: CompiledGrammar, value: Any) -> bool:
    return accepts(grammar, json.dumps(value))


def test_alternatives_that_overlap_as_sent_are_told_apart() -> None:
    """`{"a": {"x": 1}}` fits one closed alternative, and all open ones."""
    schema = {"oneOf": [model(**{name: model(x=NUMBER)}) for name in "abcd"]}
    grammar = Backends(BYTES)["llguidance"].compile(
        Constraint.json_schema(schema, open_objects=False)
    )
    assert not writable(grammar, {"a": {"x": 1}})


NAMES = ("a", "b", "c")
PARTS = st.fixed_dictionaries(
    {
        "properties": st.dictionaries(
            st.sampled_from(NAMES), st.sampled_from([NUMBER, TEXT])
        )
    }
)
CONDITION = st.fixed_dictionaries(
    {
        "if": st.just({"properties": {"a": NUMBER}, "required": ["a"]}),
        "then": PARTS,
        "else": PARTS,
    }
)
KEYWORDS = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(
            st.sampled_from(NAMES), st.sampled_from([NUMBER, TEXT])
        ),
    },
    optional={
        "allOf": st.lists(PARTS, min_size=1, max_size=2),
        "anyOf": st.lists(PARTS, min_size=2, max_size=3),
        "$ref": st.just("#/$defs/part"),
    },
)


def values() -> Iterator[dict[str, Any]]:
    for present in product([None, 1, "t"], repeat=4):
        yield {
            name: value
            for name, value in zip((*NAMES, "z"), present, strict=True)
            if value is not None
        }


@settings(max_examples=150, deadline=None)
@given(keywords=KEYWORDS, condition=CONDITION | st.just({}), part=PARTS)
def test_it_has_the_values_of_unevaluated_properties(
    keywords: Any, condition: Any, part: Any
) -> None:
    """With `anyOf` it may have fewer, those of one alternative. All of them satisfy the
    schema as sent."""
    schema = {**keywords, **condition, "$defs": {"part": part}}
    form = canonical(schema, open_objects=False)
    found = Draft202012Validator({"$defs": form.definitions, "allOf": [form.root]})
    expected = Draft202012Validator({**schema, "unevaluatedProperties": False})
    sent = Draft202012Validator(schema)
    for value in values():
        if found.is_valid(value):
            assert sent.is_valid(value)
            assert "z" not in value
        elif expected.is_valid(value):
            assert "anyOf" in schema, value


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_no_additional_key_is_nearly_a_declared_one(backend: str) -> None:
    """2,000 keys of an open object, sampled among the letters that would make such a
    key."""
    names = ["id", "unit price", "Née"]
    constraint = Constraint.json_schema(
        model(**dict.fromkeys(names, True)), open_objects=True
    )
    grammar = Backends(BYTES)[backend].compile(constraint)
    letters = np.array(sorted({*tokens('idIDunit priceUNÉéeNs "')}))
    chance = random.Random(0)
    row = np.empty(WORDS, np.int32)
    start = grammar.matcher()
    start.accept_tokens(tokens('{"'))
    keys = []
    for _ in range(2_000):
        matcher = start.fork()
        written = tokens(chance.choice([*names, *map(str.upper, names), "i", "un", ""]))
        matcher.accept_tokens(written)
        while written[-1:] != tokens('"'):
            matcher.fill_bitmask(row)
            written.append(
                chance.choice(np.intersect1d(letters, allowed_ids(row)).tolist())
            )
            matcher.accept_tokens(written[-1:])
        keys.append(BYTES.decode(written[:-1]).decode(errors="replace"))
    doubles = {key for key in keys if key.strip().lower() in map(str.lower, names)}
    assert doubles == {*names}
    assert len({*keys}) > 1_000
