"""Structural tags beyond the contract: special tokens, what ends a part, and what is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided.backends import Backends
from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

TEXT: dict[str, Any] = {"type": "any_text"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def pattern(value: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": value}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def series(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def of(form: dict[str, Any]) -> Constraint:
    return Constraint.structural_tag({"type": "structural_tag", "format": form})


def accepts(matcher: Matcher, content: str, vocabulary: Vocabulary) -> bool:
    """Whether a whole output is allowed, byte by byte."""
    single = {spelled: token for token, spelled in enumerate(vocabulary.token_bytes) if len(spelled) == 1}
    data = content.encode()
    try:
        for index in range(len(data)):
            matcher.accept_tokens([single[data[index : index + 1]]])
    except TokenRejected:
        return False
    return matcher.is_accepting()


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        (text("ab"), ["ab"], ["", "a", "abc"]),
        (series(tag("<", TEXT, ">"), text("!")), ["<>!", "<a b>!"], ["<>", "<>>!", "<a>"]),
        (tag("", {"type": "any_text", "excludes": ["no"]}, ["/x", "/y"]), ["/x", "n/y"], ["no/x", "/z", "/x "]),
        (tag("<a>", pattern("a*"), "ab"), ["<a>ab", "<a>aaab"], ["<a>aaa", "<a>b", "<a>aba"]),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": tag("(", {"type": "json_object"}, ")")},
            ["({})", '({"a": 1})({})'],
            ["", "(1)", "({})({})({})"],
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
        (
            {
                "type": "tags_with_separator",
                "separator": ", ",
                "tags": [tag('{"n": "a"', text("}"), ""), tag('{"n": "ab"', text("}"), "")],
            },
            ["", '{"n": "a"}, {"n": "ab"}'],
            ['{"n": "a"},', '{"n": "b"}'],
        ),
    ],
)
def test_languages(
    backends: Backends, vocabulary: Vocabulary, backend: str, form: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    grammar = backends[backend].compile(of(form))
    for content in valid:
        assert accepts(grammar.matcher(), content, vocabulary), content
    for content in invalid:
        assert not accepts(grammar.matcher(), content, vocabulary), content


SPECIAL = {
    "type": "triggered_tags",
    "triggers": ["<|system|>"],
    "tags": [tag("<|system|>f<|user|>", {"type": "json_schema", "json_schema": {"type": "integer"}}, "<|pad|>")],
}


@pytest.mark.parametrize(
    "form", [SPECIAL, {**SPECIAL, "type": "token_triggered_tags", "trigger_tokens": ["<|system|>"]}]
)
def test_special_tokens(backends: Backends, vocabulary: Vocabulary, form: dict[str, Any]) -> None:
    if form["type"] == "token_triggered_tags":
        begin = {"type": "token", "token": "<|system|>"}
        inner = series(text("f<|user|>"), {"type": "json_schema", "json_schema": {"type": "integer"}})
        del (form := dict(form))["triggers"]
        form["tags"] = [tag(begin, inner, {"type": "token", "token": vocabulary.special_names["<|pad|>"]})]
    grammar = backends["llguidance"].compile(of(form))
    names = vocabulary.special_names
    worker = MaskWorker(vocabulary)
    worker.install("g", grammar)
    worker.open(0, "g")
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    call = [names["<|system|>"], *vocabulary.encode("f"), names["<|user|>"], *vocabulary.encode("12"), names["<|pad|>"]]
    output = [*vocabulary.encode("Hi <|sys"), *call, *vocabulary.encode("!"), *call]
    special = set(vocabulary.special_token_ids)
    allowed = []
    for position in range(len(output) + 1):
        assert worker.fill(0, output[position - 1 : position] if position else [], row) is None
        allowed.append(set(allowed_ids(row).tolist()))
        if position < len(output):
            assert output[position] in allowed[-1], position
    start = len(vocabulary.encode("Hi <|sys"))
    assert allowed[0] & special == {names["<|system|>"], *vocabulary.stop_token_ids} & special
    assert allowed[start + 1] & special == set()
    assert allowed[start + 2] == {names["<|user|>"]}
    # Text that looks like the special token would be read as one.
    assert not accepts(grammar.matcher(), "Hi <|system|>", vocabulary)
    with pytest.raises(TokenRejected):
        grammar.matcher().accept_tokens([names["<|user|>"]])


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (series(TEXT, {"type": "json_object"}), "where a part ends"),
        (series(TEXT, TEXT), "where a part ends"),
        ({"type": "plus", "content": pattern("a")}, "where a part ends"),
        ({"type": "token", "token": "<|end|>"}, "stop token"),
        ({"type": "token", "token": "<|nonesuch|>"}, "no special token"),
        ({"type": "token", "token": 100}, "no special token"),
    ],
)
def test_what_llguidance_cannot_enforce(backends: Backends, form: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=what):
        backends["llguidance"].compile(of(form))


def test_xgrammar_has_no_special_tokens(backends: Backends) -> None:
    with pytest.raises(UnsupportedConstraint, match="special token"):
        backends["xgrammar"].compile(of(SPECIAL))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_errors_in_contents_say_where(backends: Backends, backend: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    form = tag("<", {"type": "json_schema", "json_schema": schema}, ">")
    constraint = Constraint.structural_tag({"type": "structural_tag", "format": form}, strict_schema=True)
    with pytest.raises(InvalidConstraint) as caught:
        backends[backend].compile(constraint)
    assert caught.value.param == "structural_tag"
    assert caught.value.pointer == "/format/content/json_schema/properties/a/pattern"


def limited(limit: int, begin: str = "", end: str = "</t>") -> dict[str, Any]:
    return series(tag(begin, {**TEXT, "max_tokens": limit}, end), text("!"))


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
    worker.install("g", grammar)
    worker.open(0, "g")
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
    worker.open(4, "g", tokens=[*first, a, a, a, a, wide[0]])
    assert worker.fill(4, (), row) is None
    assert wide[1] in allowed_ids(row)
    worker.edit(4, len(first) + 5, wide[1:])
    assert worker.fill(4, (), row) is None
    assert list(allowed_ids(row)) == last[:1]
    # Text that ends by itself has no more to spell.
    worker.open(3, "g", tokens=[*first, a, *last])
    assert worker.fill(3, (), row) is None
    assert list(allowed_ids(row)) == vocabulary.encode("!")


@pytest.mark.parametrize(
    "form", [{**TEXT, "max_tokens": 3}, series(pattern("a"), limited(3)), series(limited(3), limited(3))]
)
def test_limits_that_cannot_be_enforced(backends: Backends, form: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedConstraint, match=r"max_tokens|where a part ends"):
        backends["llguidance"].compile(of(form))
    with pytest.raises(UnsupportedConstraint, match="max_tokens"):
        backends["xgrammar"].compile(of(form))


LEAVES = st.one_of(
    st.sampled_from(["a", "ab", "<", "<b", "b>"]).map(lambda value: (text(value), re.escape(value))),
    st.sampled_from(["a*", "[ab]", "a|bb", "<?b"]).map(lambda value: (pattern(value), f"(?:{value})")),
)
"""Formats, and the same as regexes of Python."""


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (series(*(form for form, _ in parts)), "".join(regex for _, regex in parts))
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (
                {"type": "or", "elements": [form for form, _ in parts]},
                "(?:" + "|".join(regex for _, regex in parts) + ")",
            )
        ),
        inner.map(lambda part: ({"type": "optional", "content": part[0]}, f"(?:{part[1]})?")),
        inner.map(lambda part: (tag("<", part[0], [">", "/>"]), f"<(?:{part[1]})/?>")),
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.recursive(LEAVES, _combined, max_leaves=5), seed=st.integers(0, 1000))
def test_random_formats(backends: Backends, vocabulary: Vocabulary, case: Any, seed: int) -> None:
    """An output satisfies its format, and an output never gets stuck."""
    form, regex = case
    try:
        matcher = backends["llguidance"].compile(of(form)).matcher()
    except UnsupportedConstraint:
        return
    generator = random.Random(seed)
    output = b""
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    for _ in range(30):
        matcher.fill_bitmask(row)
        allowed = np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)
        if matcher.is_accepting():
            assert re.fullmatch(regex, output.decode()), output
        else:
            assert len(allowed), output
        if not len(allowed):
            break
        token = int(generator.choice(list(allowed)))
        matcher.accept_tokens([token])
        output += vocabulary.token_bytes[token]
