"""Constraints of every kind, with texts that satisfy them and texts that do not, and
walks through a matcher."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary

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
LARK = 'start: "SELECT " column ("," " " column)* " FROM " NAME\ncolumn: NAME | "*"\nNAME: /[a-z]+/\n'
GBNF = 'root ::= item ("," item)*\nitem ::= [0-9]+ | "é0" [é-ü0]{2} | "(" root ")"\n'


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
        {
            "begin": "<f=dice>",
            "schema": {"type": "integer", "minimum": 1, "maximum": 6},
            "end": "</f>",
        },
    ],
    "triggers": ["<f="],
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
    valid = jsonschema.Draft202012Validator(schema).is_valid(arguments) and rest[
        end:
    ].startswith("</f>")
    return valid and is_calls(rest[end + 4 :])


def is_json(text: str, schema: Any) -> bool:
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def is_list(text: str) -> bool:
    """Whether `text` is a sentence of GBNF: removes the innermost brackets until none
    is left."""
    text = re.sub(r"é0[é-ü0]{2}", "0", text)
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
        [
            '{"name":"Ada","age":36,"tags":["math","engines"]}',
            '{"name": "Zoë 狐 😀", "age": -1, "tags": []}',
        ],
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
        "object",
        Constraint.json_object(),
        ["{}", '{"a": [1, 2.5, null, {"b": "c"}], "d": true}', '{"é":"\\n\\\\"}'],
        ["[]", "1", '{"a":1,}', "{a:1}", '{"a" 1}', '{"a":01}'],
        lambda text: isinstance(json.loads(text), dict),
    ),
    Case(
        "phone",
        Constraint.regex(r"^\+?[0-9]{2,3}-(?:[a-f]+|x{2,})é?$"),
        ["12-abc", "+123-xx", "12-xxxxé"],
        ["1-abc", "12-abc\n", "12-", "12-x", "++12-a"],
        lambda text: (
            re.fullmatch(r"\+?[0-9]{2,3}-(?:[a-f]+|x{2,})é?", text) is not None
        ),
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
        Constraint.choice(
            [
                "yes",
                "yes please",
                "no",
                'qu"o\\te\n',
                "Zürich",
                "狐狸",
                "👩‍👩‍👧",
                "[a-z]+",
                "\x1b0é0",
            ]
        ),
        [
            "yes",
            "yes please",
            "no",
            'qu"o\\te\n',
            "Zürich",
            "狐狸",
            "👩‍👩‍👧",
            "[a-z]+",
            "\x1b0é0",
        ],
        ["maybe", "yes ", "nope", "Yes", "abc", "👩"],
        lambda text: (
            text
            in [
                "yes",
                "yes please",
                "no",
                'qu"o\\te\n',
                "Zürich",
                "狐狸",
                "👩‍👩‍👧",
                "[a-z]+",
                "\x1b0é0",
            ]
        ),
    ),
    Case(
        "lark",
        Constraint.grammar(LARK),
        ["SELECT a FROM b", "SELECT abc, *, d FROM tables"],
        ["SELECT FROM b", "select a", "SELECT a, FROM b"],
        lambda text: (
            re.fullmatch(r"SELECT (?:[a-z]+|\*)(?:, (?:[a-z]+|\*))* FROM [a-z]+", text)
            is not None
        ),
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
        "gbnf",
        Constraint.grammar(GBNF),
        ["1", "12,(3,(4)),5", "((é0ü0))"],
        ["()", "1,,2", ",1", "(1))", "é0üa"],
        is_list,
    ),
]


def mask(matcher: Matcher, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the allowed text tokens. The row is filled before: every word must be
    written."""
    row = np.full(words(vocabulary.padded_vocab_size), -1, dtype=np.int32)
    matcher.fill_bitmask(row)
    return np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)


def stop(vocabulary: Vocabulary) -> int:
    return vocabulary.stop_token_ids[0]


def walk(
    matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, limit: int
) -> bytes | None:
    """Generate random allowed tokens until a stop token; None after `limit` tokens, or
    if a checked one is violated."""
    text = b""
    for _ in range(limit):
        if matcher.violation() is not None:
            return None
        accepting = matcher.is_accepting()
        allowed = mask(matcher, vocabulary)
        assert accepting or len(allowed), text
        if accepting and (not len(allowed) or generator.random() < 0.4):
            matcher.accept_tokens([stop(vocabulary)])
            return text
        # Within strings, structural tokens are rare: prefer them, so that walks end.
        structural = [
            token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],0'
        ]
        choices = structural if structural and generator.random() < 0.6 else allowed
        token = int(generator.choice(choices))
        matcher.accept_tokens([token])
        text += vocabulary.token_bytes[token]
    return None
