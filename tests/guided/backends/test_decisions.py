"""Which texts a schema allows: inputs that a library, or the reader of schemas, once
decided wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, STOP, WORDS, accepts, tokens

from guided.backends import Backends
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.masks.worker import MaskWorker

BACKENDS = Backends(BYTES)
URI = "http://json-schema.org/draft-0{}/schema#"
DAY = {"type": "string", "format": "date"}
SPAN = {"type": "string", "format": "duration"}
NULL = {"type": "null"}
OLD_FORMATS = [
    ({"properties": {"a": {"not": SPAN}}}, ['{"a": "P"}'], ['{"a": "P1D"}']),
    ({"format": "date", "enum": ["2024-05-17", "May"]}, ['"2024-05-17"'], ['"May"']),
    (
        {"type": "array", "items": SPAN, "uniqueItems": True},
        ['["P1D"]'],
        ['["day"]', '["P1D", "P1D"]'],
    ),
    (
        {"allOf": [DAY, {"type": "string", "maxLength": 10}]},
        ['"2024-05-17"'],
        ['"2024"'],
    ),
    ({"type": "integer", "maximum": 3, "dependencies": {"a": ["b"]}}, ["3"], ["4"]),
]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("draft", [4, 6, 7])
@pytest.mark.parametrize(("schema", "valid", "invalid"), OLD_FORMATS, ids=str)
def test_old_drafts(
    schema: dict[str, Any],
    valid: list[str],
    invalid: list[str],
    draft: int,
    backend: str,
) -> None:
    decide({"$schema": URI.format(draft), **schema}, backend, valid, invalid)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {
                "$schema": URI.format(4),
                "id": "http://x.y/root",
                "properties": {
                    "n": {"$ref": "n#m", "type": "null"},
                    "k": {"$ref": "n"},
                },
                "definitions": {
                    "n": {
                        "id": "n",
                        "minimum": 3,
                        "exclusiveMinimum": True,
                        "definitions": {"m": {"id": "#m", "type": "integer"}},
                    }
                },
            },
            ['{"n": 3, "k": 4}', "{}"],
            ['{"k": 3}', '{"n": null}'],
        ),
        (
            {
                "$schema": URI.format(7),
                "type": "array",
                "items": [{"if": {"minimum": 2}, "then": {"maximum": 5}}, SPAN],
                "additionalItems": False,
            },
            ['[5, "P1D"]', "[1]"],
            ['[6, "P1D"]', '[5, "day"]', '[5, "P1D", 1]'],
        ),
        (
            {
                "$schema": URI.format(7),
                "type": "string",
                "contentMediaType": "application/json",
            },
            ['"{"', '"{}"'],
            ["{}"],
        ),
        (
            {"$schema": URI.format(6), "items": {"$ref": URI.format(6)}},
            ['[{"type": "null"}]'],
            ['[{"type": "nil"}]'],
        ),
        (
            {
                "$id": "http://x.y/list",
                "$ref": "base",
                "$defs": {
                    "more": {
                        "$dynamicAnchor": "rest",
                        "prefixItems": [True, {"type": "string"}],
                    },
                    "base": {
                        "$id": "base",
                        "type": "array",
                        "prefixItems": [{"type": "null"}],
                        "unevaluatedItems": False,
                        "$dynamicRef": "#rest",
                        "$defs": {"empty": {"$dynamicAnchor": "rest"}},
                    },
                },
            },
            ["[null]", '[null, "a"]'],
            ["[1]", "[null, 1]", '[null, "a", "b"]'],
        ),
        (
            {
                "properties": {
                    "a": {"type": "string", "pattern": "^[a-z]{3}$", "minLength": 4},
                    "b": {"type": "array", "minItems": 3, "maxItems": 2},
                    "c": {
                        "anyOf": [
                            {"type": "string", "pattern": "^(ab){2,}$", "maxLength": 3},
                            {"type": "null"},
                        ]
                    },
                }
            },
            ["{}", '{"c": null}'],
            ['{"a": "abc"}', '{"b": [1, 2]}', '{"c": "ab"}'],
        ),
        (
            {"format": "idn-email", "type": "string"},
            [
                '"петя@почта.рф"',
                '"실례@실례.테스트"',
                '"a@उदाहरण.भारत"',
                '"כ@מבחן.ישראל"',
            ],
            ['"петя"', '"a@b"', '"a@실a례"'],
        ),
        (
            {"format": "idn-hostname", "type": "string"},
            ['"παράδειγμα.example"', '"ทดสอบ"', '"مثال.مصر"', '"例え.テスト"'],
            ['"مثال.example"', '"aπ.b"', '"-"'],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "s": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/e"},
                        "uniqueItems": True,
                        "minItems": 1,
                    }
                },
                "$defs": {"e": {"enum": ["x", 2, None], "description": "a\0b"}},
            },
            ['{"s": [2, "x"]}', '{"s": [null]}', '{"s": ["x",null,2]}'],
            ['{"s": []}', '{"s": [2,2]}', '{"s": ["x", 2, "x"]}', '{"s": [3]}'],
        ),
        (
            {
                "dependencies": {"a": {"required": ["b"]}, "c": ["d"]},
                "properties": {"a": {"type": "null"}, "b": {}, "c": {}, "d": {}},
                "type": "object",
            },
            ['{"a": null, "b": 1}', '{"c": 1, "d": 2}'],
            ['{"a": null}', '{"c": 1}'],
        ),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(300)}
                | {"300": NULL},
            },
            ["null"],
            ["1"],
        ),
    ],
    ids=lambda part: str(part)[:60],
)
def test_texts(
    schema: dict[str, Any], valid: list[str], invalid: list[str], backend: str
) -> None:
    decide(schema, backend, valid, invalid)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "string", "pattern": "^[a-z]{3}$", "minLength": 4}, ""),
        ({"allOf": [{"type": "string", "maxLength": 2}, {"pattern": "^a.c"}]}, ""),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "/properties/a"),
    ],
)
def test_a_required_value_without_values_is_refused(
    part: dict[str, Any], place: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": part, "b": {"enum": [1], "type": "null"}},
        "required": ["a"],
    }
    with pytest.raises(
        InvalidConstraint, match="no value satisfies the schema"
    ) as refused:
        BACKENDS["llguidance"].compile(Constraint.json_schema(schema))
    assert refused.value.pointer == place


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "array",
            "items": {"enum": ["x", "y", "z", 1, 2]},
            "uniqueItems": True,
        },
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": n}}, "required": ["t"]}
                for n in "ab"
            ]
        },
        {
            "type": "object",
            "properties": {"t": {"enum": ["a", "b"]}, "n": {}},
            "required": ["t"],
            "if": {"properties": {"t": {"const": "a"}}},
            "then": {"required": ["n"]},
        },
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_alternatives_are_enforced(schema: dict[str, Any], backend: str) -> None:
    assert BACKENDS[backend].compile(Constraint.json_schema(schema)).checked == ()


def decide(
    schema: dict[str, Any], backend: str, valid: list[str], invalid: list[str]
) -> None:
    grammar = BACKENDS[backend].compile(Constraint.json_schema(schema))
    assert {text: accepts(grammar, text) for text in (*valid, *invalid)} == {
        **dict.fromkeys(valid, True),
        **dict.fromkeys(invalid, False),
    }


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("[1e400", "[1e40"),
        ("[-2.5E-123", "[-2.5E-12"),
        ("[0e+12, 7e99]", "[0e+12, 7e99]"),
        ('["1e400", 1e4]', '["1e400", 1e4]'),
        (f"[{'7' * 30}", f"[{'7' * 24}"),
    ],
)
def test_each_number_is_in_the_range_of_doubles(
    text: str, written: str, backend: str
) -> None:
    worker = MaskWorker(BYTES)
    worker.open(0, BACKENDS[backend].compile(Constraint.json_schema({"type": "array"})))
    row = np.empty(WORDS, np.int32)
    assert worker.fill(0, (), row) is None
    count = 0
    for token in tokens(text):
        if token not in allowed_ids(row):
            break
        assert worker.fill(0, [token], row) is None
        count += 1
    assert text[:count] == written


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"\xc3a",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xe4\xb8\xe4",
        b"\xf4\x90\x80\x80",
        b"\xc3",
    ],
)
def test_free_text_is_utf8(text: bytes, backend: str) -> None:
    tags = [{"begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}]
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    grammar = BACKENDS[backend].compile(
        Constraint.structural_tag({"type": "structural_tag", "format": form})
    )
    for before, end in ((b"", [STOP]), ("ä<f>é".encode(), tokens("</f>"))):
        output = [byte + 1 for byte in before + text]
        accepted = grammar.matcher().accepts([*output, *end])
        assert len(before) <= accepted < len(before + text) or (
            text == b"\xc3" and accepted == len(output)
        )
    assert accepts(grammar, "é <f>狐 😀</f>")


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_escaped_surrogates_come_in_pairs(backend: str) -> None:
    valid = [r'["\ud83d\ude00", "\u00e9\uE000"]', r'["\uDBFF\udfff"]', r'["\uD7ff\n"]']
    decide(
        {"type": "array", "uniqueItems": True},
        backend,
        valid,
        [r'["\ud83d"]', r'["\ude00\ud83d"]', r'["\ud83dx"]'],
    )
