"""Structural tags beyond the contract: special tokens, what ends a part, and what is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, accepts

from guided.backends import Backends
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

TEXT: dict[str, Any] = {"type": "any_text"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def pattern(value: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": value}


def token(name: str | int) -> dict[str, Any]:
    return {"type": "token", "token": name}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def series(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def of(form: dict[str, Any]) -> Constraint:
    return Constraint.structural_tag({"type": "structural_tag", "format": form})


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        (text("ab"), ["ab"], ["", "a", "abc"]),
        (
            {
                "type": "or",
                "elements": [
                    pattern("a|x"),
                    series({"type": "optional", "content": text("<")}, text("b")),
                ],
            },
            ["a", "x", "b", "<b"],
            ["", "ab", "<a", "<<b"],
        ),
        (
            series(tag("<", TEXT, ">"), text("!")),
            ["<>!", "<a b>!"],
            ["<>", "<>>!", "<a>"],
        ),
        (
            tag("", {"type": "any_text", "excludes": ["no"]}, ["/x", "/y"]),
            ["/x", "n/y"],
            ["no/x", "/z", "/x "],
        ),
        (
            tag("<a>", pattern("a*"), "ab"),
            ["<a>ab", "<a>aaab"],
            ["<a>aaa", "<a>b", "<a>aba"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [tag("<a", TEXT, ">"), tag("<ab", pattern("c"), ";")],
            },
            ["", "x", "x<a>y", "<abc>", "<a<>"],
            ["<", "x<b", "<ab", "<ax"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [tag("<a>", pattern("[0-9]"), "</a>")],
                "stop_after_first": True,
            },
            ["", "x", "x<a>1</a>"],
            ["<a>1</a>x", "x<a>"],
        ),
    ],
)
def test_languages(
    backend: str, form: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    grammar = Backends(BYTES)[backend].compile(of(form))
    assert [
        content for content in (*valid, *invalid) if accepts(grammar, content)
    ] == valid


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
SPECIAL = {
    "type": "triggered_tags",
    "triggers": ["<|system|>"],
    "tags": [tag("<|system|>f<|user|>", INTEGER, "<|pad|>")],
}
SPECIAL_BY_TOKEN = {
    "type": "token_triggered_tags",
    "trigger_tokens": ["<|system|>"],
    "tags": [
        tag(token("<|system|>"), series(text("f<|user|>"), INTEGER), token("<|pad|>"))
    ],
}


@pytest.mark.parametrize(
    "form", [SPECIAL, SPECIAL_BY_TOKEN], ids=lambda form: form["type"]
)
def test_special_tokens(
    backends: Backends, vocabulary: Vocabulary, form: dict[str, Any]
) -> None:
    grammar = backends["llguidance"].compile(of(form))
    names = vocabulary.special_names
    worker = MaskWorker(vocabulary)
    worker.open(0, grammar)
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    call = [
        names["<|system|>"],
        *vocabulary.encode("f"),
        names["<|user|>"],
        *vocabulary.encode("12"),
        names["<|pad|>"],
    ]
    output = [*vocabulary.encode("Hi <|sys"), *call, *vocabulary.encode("!"), *call]
    special = set(vocabulary.special_token_ids)
    allowed = []
    for position in range(len(output) + 1):
        assert (
            worker.fill(0, output[position - 1 : position] if position else [], row)
            is None
        )
        allowed.append(set(allowed_ids(row).tolist()))
        if position < len(output):
            assert output[position] in allowed[-1], position
    start = len(vocabulary.encode("Hi <|sys"))
    assert (
        allowed[0] & special
        == {names["<|system|>"], *vocabulary.stop_token_ids} & special
    )
    assert allowed[start + 1] & special == set()
    assert allowed[start + 2] == {names["<|user|>"]}
    # Text that looks like the special token would be read as one.
    look_alike = vocabulary.encode("Hi <|system|>")
    assert grammar.matcher().accepts(look_alike) < len(look_alike)
    assert grammar.matcher().accepts([names["<|user|>"]]) == 0


def limited(limit: int, begin: str = "", end: str = "</t>") -> dict[str, Any]:
    return series(tag(begin, {**TEXT, "max_tokens": limit}, end), text("!"))


AMBIGUOUS = "where a part ends"


@pytest.mark.parametrize(
    ("backend", "form", "what"),
    [
        ("llguidance", series(TEXT, {"type": "json_object"}), AMBIGUOUS),
        ("llguidance", {"type": "plus", "content": pattern("a")}, AMBIGUOUS),
        ("llguidance", token("<|end|>"), "stop token"),
        ("llguidance", token("<|nonesuch|>"), "no special token"),
        ("llguidance", token(100), "no special token"),
        ("llguidance", {**TEXT, "max_tokens": 3}, "max_tokens"),
        ("llguidance", series(pattern("a"), limited(3)), AMBIGUOUS),
        ("llguidance", series(limited(3), limited(3)), "max_tokens"),
        ("xgrammar", SPECIAL, "special token"),
        ("xgrammar", series(pattern("a"), limited(3)), "max_tokens"),
        ("xgrammar", series(limited(3), limited(3)), "max_tokens"),
    ],
)
def test_what_cannot_be_enforced(
    backends: Backends, backend: str, form: dict[str, Any], what: str
) -> None:
    with pytest.raises(UnsupportedConstraint, match=what):
        backends[backend].compile(of(form))


@pytest.mark.parametrize(
    ("backend", "begin", "end"),
    [
        ("llguidance", "", "</t>"),
        ("llguidance", "<t>", "</t>"),
        ("llguidance", "<|user|>", "<|system|>"),
        ("xgrammar", "<t>", "</t>"),
    ],
)
def test_a_limit_on_the_tokens_of_free_text(
    backends: Backends, vocabulary: Vocabulary, backend: str, begin: str, end: str
) -> None:
    grammar = backends[backend].compile(of(limited(5, begin, end)))
    worker = MaskWorker(vocabulary)
    worker.open(0, grammar)
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    names = vocabulary.special_names
    first = [names[begin]] if begin in names else vocabulary.encode(begin)
    last = [names[end]] if end in names else vocabulary.encode(end)
    a = vocabulary.encode("a")[0]
    output: list[int] = []
    for token in [*first, a, a, a, a, a]:
        assert worker.fill(0, output[-1:], row) is None
        assert token in allowed_ids(row)
        output.append(token)
    for token in last:  # exactly the end is allowed
        assert worker.fill(0, output[-1:], row) is None
        assert list(allowed_ids(row)) == [token]
        output.append(token)
    assert worker.fill(0, output[-1:], row) is None
    assert list(allowed_ids(row)) == vocabulary.encode("!")
    # A character is completed first.
    wide = vocabulary.encode("狐")
    assert len(wide) > 1
    worker.open(4, grammar, tokens=[*first, a, a, a, a, wide[0]])
    assert worker.fill(4, (), row) is None
    assert wide[1] in allowed_ids(row)
    worker.edit(4, len(first) + 5, wide[1:])
    assert worker.fill(4, (), row) is None
    assert list(allowed_ids(row)) == last[:1]
    # Text that ends by itself has no more to spell.
    worker.open(3, grammar, tokens=[*first, a, *last])
    assert worker.fill(3, (), row) is None
    assert list(allowed_ids(row)) == vocabulary.encode("!")
