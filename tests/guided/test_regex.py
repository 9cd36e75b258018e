"""Patterns in the common subset have the meaning of `re.fullmatch`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import regex as unicode_regex
from hypothesis import given, settings
from hypothesis import strategies as st

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.regex import parser
from guided.regex.parser import parse, parse_search
from guided.regex.tree import Node, render


def canonical(pattern: str) -> str:
    """`pattern` in the common subset."""
    return render(parse(pattern))


def parse_ecma(pattern: str) -> Node:
    """The strings that `pattern` of a JSON schema matches as a whole."""
    return parse_search(f"^(?:{pattern})$")


ATOMS = [
    "a",
    "b",
    "é",
    "日",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    ".",
    "[a-c]",
    "[^a]",
    r"[^\W\d]",
    r"[\]\-^&~]",
]
ATOMS += [
    r"\.",
    r"\x41",
    r"\u00e9",
    r"\n",
    "/",
    "-",
    r"[\s\S]",
    "(?i:k)",
    "(?i:[a-f]x)",
    "(?s:.)",
    '"',
]

patterns = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda options: "(?:" + "|".join(options) + ")"
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda options: "(" + "|".join([*options, ""]) + ")"
        ),
        st.tuples(
            inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "??"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
texts = st.text(alphabet='abcxkKAé日\u0661 \n\t\x1c_.-]/"\u212a\u0301', max_size=6)


@given(patterns, texts)
@settings(max_examples=100, deadline=None)
def test_the_common_subset_matches_the_same_texts(pattern: str, text: str) -> None:
    assert bool(re.fullmatch(canonical(pattern), text)) == bool(
        re.fullmatch(pattern, text)
    )


@given(
    st.sampled_from(["=", "!"]), patterns, st.sampled_from(["", "$"]), patterns, texts
)
@settings(max_examples=40, deadline=None)
def test_lookaheads_at_the_beginning(
    sign: str, ahead: str, end: str, rest: str, text: str
) -> None:
    pattern = f"(?{sign}{ahead}{end}){rest}"
    try:
        node = parse(pattern)
    except UnsupportedConstraint:  # too large, or nothing is left
        return
    for each in (text, text + "\n"):
        assert bool(re.fullmatch(render(node), each)) == bool(
            re.fullmatch(pattern, each)
        )


@pytest.mark.parametrize(
    "pattern", ["(?P<name>a)", "^a$", r"\Aa\Z", "(^a)$", "(?:^a$)", "(^|^)a", "(?m)^a$"]
)
def test_anchors_at_the_ends_say_nothing(pattern: str) -> None:
    assert canonical(pattern) == "a"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a(?=a)", "lookaround"),
        (r"(a)\1", "backreference"),
        ("(a)?(?(1)b|c)", "conditional"),
        (r"\bword\b", "word boundary"),
        ("a^b", "anchor"),
        ("a*+", "possessive"),
        ("(?>a)", "atomic"),
    ],
)
def test_what_no_mask_can_follow_is_refused_by_name(pattern: str, named: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=named):
        canonical(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(", "[", "a{2,1}", "*", r"\q", r"[^\s\S]", "a{99999999999}", "(?a)(?u)x"],
)
def test_a_malformed_pattern_is_the_users(pattern: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        canonical(pattern)
    assert not isinstance(caught.value, UnsupportedConstraint)


# The dialect: ECMA-262 with the spellings of Python and Rust. The oracle is the package
# `regex`.

_PROPERTIES = [
    "L",
    "Letter",
    "Lu",
    "Nd",
    "P",
    "Script=Greek",
    "Greek",
    "sc=Cyrl",
    "White_Space",
    "Alphabetic",
    "ASCII",
]
ecma_atoms = st.one_of(
    st.sampled_from(["a", "[a-f]", r"\d", r"\w", "(?<x>b)", r"\/", "é", r"[\w.-]"]),
    st.sampled_from(_PROPERTIES).map(lambda name: rf"\p{{{name}}}"),
    st.sampled_from(_PROPERTIES).map(lambda name: rf"\P{{{name}}}"),
    st.sampled_from(_PROPERTIES).map(lambda name: rf"[^\p{{{name}}}b]"),
    st.sampled_from(_PROPERTIES).map(lambda name: rf"[\P{{{name}}}1-3]"),
)
ecma_texts = st.text(alphabet="abxYéÄ\u03b1Ω\u0436Ж1\u0663.-_/ \u00a0日😀", max_size=5)


@given(
    st.lists(ecma_atoms, min_size=1, max_size=3),
    st.sampled_from(["", "+", "*", "?"]),
    ecma_texts,
)
@settings(max_examples=40, deadline=None)
def test_properties_and_named_groups(atoms: list[str], count: str, text: str) -> None:
    atoms = [atom.replace("<x>", f"<x{index}>") for index, atom in enumerate(atoms)]
    pattern = "".join(atoms) + count
    # In a schema's pattern \d and \w are ASCII.
    ascii_only = (
        pattern.replace(r"\d", "[0-9]")
        .replace(r"[\w.-]", "[a-zA-Z0-9_.-]")
        .replace(r"\w", "[a-zA-Z0-9_]")
    )
    expected = bool(unicode_regex.fullmatch(ascii_only, text))
    assert bool(re.fullmatch(render(parse_ecma(pattern)), text)) == expected


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (
            r"\pL+",
            ["aé日"],
            ["1", "", "\ua7cb"],
        ),  # a letter since Unicode 16: Python and jsonschema-rs know older ones
        (r"\u{41}\x{1F600}", ["A😀"], ["u"]),
        (r"\ud83d\ude00", ["😀"], []),
        (r"[\ud83d\ude00-\u{1F64F}]", ["😀", "😁"], ["\ud83d"]),
        (r"(?<year>\d{4})-(?P<month>\d\d)", ["2024-02"], ["2024"]),
        (r"[:alpha:]", [":", "a"], ["b"]),
        (r"[\]&&x]", ["]", "&", "x"], ["\\"]),
        (r"^[\u0000-\u001f]$", ["\x00", "\x1f"], ['"', "\\", " "]),
    ],
)
def test_spellings_of_other_dialects(
    pattern: str, texts: list[str], others: list[str]
) -> None:
    matches = re.compile(render(parse_ecma(pattern))).fullmatch
    assert all(matches(text) for text in texts)
    assert not any(matches(text) for text in others)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("[[:alpha:]]+", "POSIX class"),
        ("[^x[:^digit:]]", "POSIX class"),
        ("[a-z&&[^aeiou]]", "&&"),
        (r"(?<x>a)\k<x>", "backreference"),
        (r"\p{L}" * 40, "too many"),
    ],
)
def test_what_dialects_read_differently_is_refused(pattern: str, named: str) -> None:
    for read in (parse_ecma, canonical):
        with pytest.raises(InvalidConstraint, match=named):
            read(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\p{Nonsense}", r"\p{}", r"\u{110000}", r"\p{L", r"[z-\p{L}]"]
)
def test_properties_and_code_points_that_do_not_exist(pattern: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        parse_ecma(pattern)
    assert not isinstance(caught.value, UnsupportedConstraint)


def test_an_empty_lookahead_of_python_313_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parser names `(?!)` FAILURE."""
    read = parser._sre.parse

    def renamed(*arguments: Any, **named: Any) -> Any:
        tree = read(*arguments, **named)
        tree.data = [(parser._sre.FAILURE, ()) for _ in tree.data]
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(parser._sre, "parse", renamed)
        with pytest.raises(UnsupportedConstraint) as raised:
            parse("a")
    assert "negative lookaround" in str(raised.value)
