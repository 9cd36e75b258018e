"""Patterns of JSON Schema as text between the quotes of a JSON string."""

from __future__ import annotations

import datetime
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.regex import tree as regex
from guided.regex.parser import parse_search
from guided.schema import string_pattern
from guided.schema.formats import FORMATS

SEARCHED = [
    "a",
    "^a",
    "a$",
    "^a$",
    "",
    "^a|b$",
    "^ab|^ab$",
    "^(a|b)",
    "[^a]b",
    "^.b",
    r"\S\s?$",
]


def found(pattern: str, text: str) -> bool:
    """`$` is the end of the string, as in JSON Schema, not the position before a last
    newline."""
    return re.search(pattern.replace("$", r"\Z"), text) is not None


@settings(deadline=None)
@given(st.sampled_from(SEARCHED), st.text('ab"\\\n\té', max_size=5))
def test_json_text_of_exactly_the_strings_that_match(pattern: str, text: str) -> None:
    node = string_pattern.in_json(parse_search(pattern), escapes=True)
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    assert (re.fullmatch(regex.render(node), written) is not None) == found(
        pattern, text
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!a)",
        "^(?!ab$)[ab]*$",
        "^(?=.*b)(?!.*aa)[ab]{2,3}$",
        "^(?!(?!a).)",
        "^(?!a)b|^(?=aa)",
        "^(?=a{2}$).*|b$",
    ],
)
def test_lookaheads_after_the_beginning(pattern: str) -> None:
    for text in map(
        "".join,
        (
            letters
            for size in range(5)
            for letters in itertools.product("abc", repeat=size)
        ),
    ):
        matching = re.search(pattern, text) is not None
        assert string_pattern.matches(pattern, text) == matching, text


def test_what_has_to_be_escaped_and_may_not_be_is_refused() -> None:
    for pattern in ('^"$', r"^\\$", "^a\n"):
        with pytest.raises(UnsupportedConstraint, match="escaped"):
            string_pattern.in_json(parse_search(pattern), escapes=False)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\d", "0123456789"),
        (r"\w", "AZ_az09"),
        (
            r"\s",
            "\t\n\v\f\r \xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
        ),
        (r"[^\S]", "\ufeff "),
        (".", "a\x00\x85\x1c"),
        ("[a&&b]", "a&b"),
        ("[\\b]", "\b"),
    ],
)
def test_classes_are_those_of_ecma_262(pattern: str, found: str) -> None:
    others = "\x00\x1c\x1d\x85\u180e\u200b٣é狐-^|"
    for character in found:
        assert string_pattern.matches(f"^{pattern}$", character), character
    for character in "\n\r\u2028\u2029" if pattern == "." else others:
        assert not string_pattern.matches(f"^{pattern}$", character), character


def test_whitespace_is_that_of_json() -> None:
    blanks = re.compile(string_pattern.whitespace(r"\s*|\n\S{0}"))
    assert blanks.fullmatch(" \t\r\n")
    assert not blanks.fullmatch("\xa0")
    assert string_pattern.whitespace("") == ""
    for pattern in ("a", " |xy", r"\xa0", r"\S"):
        with pytest.raises(InvalidConstraint, match="carriage return"):
            string_pattern.whitespace(pattern)


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("^[a-z]+$", 2, 4),
        ("^[a-z]*$", 0, 3),
        ("^x[a-z]*y$", 3, 5),
        ("^[a-z]{3}$", 1, 9),
        ("^[ab]{2,}$", 0, 3),
        ("^(aa)+$", 3, 9),
    ],
)
def test_lengths_are_fitted_in(pattern: str, least: int, most: int) -> None:
    fitted = re.compile(
        regex.render(string_pattern.fit(parse_search(pattern), least, most))
    )
    for length in range(12):
        for text in ("a" * length, "x" + "a" * (length - 2) + "y"):
            matches = (
                re.search(pattern, text) is not None and least <= len(text) <= most
            )
            assert (fitted.fullmatch(text) is not None) == matches, text


@settings(deadline=None)
@given(st.integers(0, 9999), st.integers(0, 99), st.integers(0, 99))
def test_no_other_date_is_one(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        assert not re.search(FORMATS["date"], text)


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.25+01:30"],
            ["2023-02-29T00:00:00Z", "2024-01-01"],
        ),
        ("time", ["12:00:00Z"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
        ("duration", ["P1D", "PT36H", "P2W", "P1DT2H3M"], ["P", "1D", "PT"]),
        (
            "email",
            ["a.b+c@example.org", "a.b.c.d.e@f.gh"],
            ["a", "@b.c", "a b@c.de", 'a"b@c.de', "a..b@c.de"],
        ),
        (
            "hostname",
            ["example.org", "a-b", f"{'a' * 63}.s3.dualstack.us-west-2.amazonaws.com"],
            ["-a", "a..b", ""],
        ),
        ("ipv4", ["0.0.0.0", "255.249.199.9"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        (
            "uri",
            ["https://example.org/a?b=c#d", "http://h:80"],
            ["example.org", "http://[", 'http://a/"'],
        ),
        (
            "uuid",
            ["123e4567-e89b-12d3-a456-426614174000"],
            ["123e4567e89b12d3a456426614174000"],
        ),
    ],
)
def test_formats(name: str, valid: list[str], invalid: list[str]) -> None:
    assert all(re.search(FORMATS[name], text) for text in valid)
    assert not any(re.search(FORMATS[name], text) for text in invalid)
    string_pattern.in_json(parse_search(FORMATS[name]), escapes=False)


@settings(max_examples=10, deadline=None)
@given(st.from_regex(FORMATS["regex"]))
def test_the_format_regex_matches_regular_expressions(text: str) -> None:
    re.compile(text)


NAMES = ["a", "unit price", "First", "née", "firstname", "x" * 80]


@given(
    st.sampled_from(
        [
            made
            for name in NAMES
            for made in (name, name.upper(), name.title(), name[:-1], name + "s")
        ]
    ),
    st.text(" \t\n\u2003b", max_size=2),
    st.text(" \t\n\u2003b", max_size=2),
)
def test_other_names_are_no_near_doubles(name: str, before: str, after: str) -> None:
    written = before + name + after
    found = (
        re.fullmatch(regex.render(string_pattern.other_names(NAMES)), written)
        is not None
    )
    is_double = written.strip().lower() in [each.lower() for each in NAMES]
    is_continued = written.lower().startswith("x" * 64)
    assert found == (
        not is_double and not is_continued and written[:1].strip() == written[:1]
    )
