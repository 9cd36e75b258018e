"""Tests specific to lm-format-enforcer: invalid JSON that it accepts, lengths, and characters byte by byte."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES

from guided.backends.lmformatenforcer import LMFormatEnforcerBackend
from guided.backends.mask_cache import MaskCache
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import BackendError, UnsupportedConstraint
from guided.vocabulary import Vocabulary

ROW = np.zeros(words(BYTES.padded_vocab_size), dtype=np.int32)
LISTS: Any = {"anyOf": [{"items": {"type": "null"}, "maxItems": 2}, {"items": {"type": "boolean"}, "minItems": 2}]}
NODE: Any = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}}, ['{"b":1,"a":[{}]}'], ['{"a":1,}', '{"c":1}']),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, -20]"], ["[1,]", "[1e-5]", "[-0.5]"]),
        ({"type": "number"}, ["-0.5e5", "-0.5", "0"], ["1.e5", "01", "1 "]),
        ({"type": "string"}, ['" a\\u00e9 狐"'], ['"a\tb"', '"\\ud83d\\ude00"', '"\\x"']),
        ({"type": "string", "minLength": 2}, ['"\\n\\u00e9"', '"狐é"'], ['"\\n"', '"狐"']),
        ({"type": "string", "maxLength": 2}, ['"  "', '"狐狸"', '""'], ['"   "', '"狐狸a"']),
        ({"type": "string", "pattern": "^ [^é]$"}, ['" a"', '" 狐"'], ['"  a"', '" é"', '" ""']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"enum": [" a b", "狐", 1, None, True]}, ['" a b"', '"狐"', "1", "null", "true"], ['"a b"', "false"]),
        ({"type": "object", "required": ["k"], "additionalProperties": {"type": "null"}}, ['{"k":null}'], ["{}"]),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}', "{} ", " {}"]),
        ({"type": "array", "items": {"type": "array"}, "minItems": 2}, ["[[1] , []]"], ["[[]]", "[]"]),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[true,false]"], ["[true,true,true]"]),
        (LISTS, ["[null]", "[true,true]", "[]"], ["[true]", "[null,true]", "[null,null,null]"]),
        (NODE, ["{}", '{"next":{"next":{}}}'], ['{"next":1}']),
    ],
    ids=str,
)
def test_enforced_keywords(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = LMFormatEnforcerBackend(BYTES).compile(Constraint("json_schema", json.dumps(schema)))
    found = []
    for text in (*valid, *invalid):
        output = [byte + 1 for byte in text.encode()]
        if grammar.matcher().accepts([*output, *BYTES.stop_token_ids]) == len(output) + 1:
            found.append(text)
    assert found == valid


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string", "format": "date"}, "/format"),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "/prefixItems"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}], "type": "array"},
            "/items",
        ),
        ({"type": "string", "pattern": "a", "minLength": 3}, "/minLength"),
        ({"enum": ["a\n"]}, "/enum"),
        ({"const": {"a": 1}}, "/const"),
        ({"type": "object", "required": ['q"']}, "/required"),
    ],
    ids=json.dumps,
)
def test_refused_keywords(schema: Any, pointer: str) -> None:
    with pytest.raises(UnsupportedConstraint) as caught:
        LMFormatEnforcerBackend(BYTES).compile(Constraint.json_schema(schema, strict_schema=True))
    assert (caught.value.pointer, caught.value.param) == (pointer, "json_schema")


def test_an_error_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own enforcer logs it and allows end-of-sequence only."""
    matcher = LMFormatEnforcerBackend(BYTES).compile(Constraint.json_object()).matcher()

    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("lmformatenforcer.jsonschemaparser.JsonSchemaParser.get_allowed_characters", broken)
    with pytest.raises(BackendError, match="KeyError"):
        matcher.fill_bitmask(ROW)
    with pytest.raises(BackendError, match="KeyError"):
        matcher.accept_tokens([ord("{") + 1])


@pytest.mark.parametrize("items", [{"type": "string"}, {"type": "string", "pattern": "^[a-z ]*$"}])
def test_equal_states_share_a_mask(vocabulary: Vocabulary, items: Any) -> None:
    masks = MaskCache()
    backend = LMFormatEnforcerBackend(vocabulary, masks)
    matcher = backend.compile(
        Constraint.json_schema({"type": "object", "additionalProperties": {"items": items}})
    ).matcher()
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for text in ('{"a":["some', " words", '"],"b":["some', " more"):
        matcher.accept_tokens(vocabulary.encode(text))
        matcher.fill_bitmask(row)
    assert masks.nbytes == row.nbytes


@pytest.mark.parametrize("pattern", [r"[^\x00-\uffff]", r"[^\x00-\u0fff]{2}", r"[^\x00-\ud7ff]", r"[\ue000-\uffff]"])
def test_characters_byte_by_byte(pattern: str) -> None:
    """The first bytes of a character are allowed where one with these bytes is, and only there."""
    grammar = LMFormatEnforcerBackend(BYTES).compile(Constraint.regex(pattern))
    for seed in range(40):
        matcher, chosen, generator = grammar.matcher(), bytearray(), random.Random(seed)
        while not matcher.is_accepting():
            matcher.fill_bitmask(ROW)
            token = generator.choice(allowed_ids(ROW).tolist())
            chosen.append(BYTES.token_bytes[token][0])
            matcher.accept_tokens([token])
        assert re.fullmatch(pattern, chosen.decode())
