"""Sizes are found by reading the text once: whatever it is, and whether or not it is well formed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided.errors import ConstraintTooLarge
from guided.limits import DEFAULT_LIMITS, Limits

SMALL = Limits(max_nesting=3, max_repetition=100, max_grammar_rules=3)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{100}",
        "(a{10}){10}",
        "[{101}]",  # in a class, braces are characters
        r"\{101\}",
        r"\x{101}a",
        r"\p{Lu}{100}",
        "[((((]",
        r"\(\(\(\(",
        "(((a)))",
        "(a)(b)(c)(d)",
        "(((a)))(((b)))",
        "a{",
        "a{x}",
        "[]((((]",
        "[^]((((]",
        "(a{100}b){1}",
        "(a{50})b{50}",
    ],
)
def test_regexes_within_the_limits(pattern: str) -> None:
    SMALL.check_regex(pattern, "regex")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a{101}", "beyond the limit of 100"),
        ("a{1,101}", "101"),
        ("a{101,}", "101"),
        ("a{,101}", "101"),
        ("a{99999999999999999999999999}", "limit of 100"),
        ("a{" + "9" * 5000 + "}", "limit of 100"),
        ("(a{11}){10}", "nested repetitions"),
        ("((a{5}){5}){5}", "nested repetitions"),
        ("[]a{101}", None),  # "]" first in a class is a character: all of it is one class, and no repetition
        ("((((a))))", "nested deeper than 3"),
        ("((((", "nested deeper than 3"),
        ("[a](((([b]))))", "nested deeper than 3"),
    ],
)
def test_regexes_over_the_limits(pattern: str, what: str | None) -> None:
    if what is None:
        SMALL.check_regex(pattern, "regex")
        return
    with pytest.raises(ConstraintTooLarge, match=what) as caught:
        SMALL.check_regex(pattern, "structured_outputs.regex", "/pattern")
    assert (caught.value.param, caught.value.pointer) == ("structured_outputs.regex", "/pattern")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "{\\"a\\":{101}}"',  # a literal's braces are text
        "root ::= [({101}]",
        "root ::= a # ((((a{101}\na ::= b{100}",
        'root ::= (("a" | "b")) | ("c")',
        'start: "{101}"\nA: /[({]a{100}/\n',
        "start: a~1..100 // ~101\na: (b)\n",
    ],
)
def test_grammars_within_the_limits(text: str) -> None:
    SMALL.check_grammar(text, "grammar")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('root ::= "a"{101}', "101"),
        ("root ::= ((((a))))", "nested deeper"),
        ("root ::= a{1, 101}", "101"),
        ("start: /a{101}/", "101"),
        ("start: /((((a))))/", "nested deeper"),
        ("start: a~101", "101"),
        ("start: a~1..101", "101"),
        ("start: [[[[a]]]]", "nested deeper"),
        ("a ::= b\nb ::= c\nc ::= d\nd ::= e", "4 rules; the limit is 3"),
        ("start: b\n?b: c\n!c: d\nD.2: /e/", "4 rules; the limit is 3"),
        ("root ::= a b::=c c::=d d::=e", "4 rules"),
    ],
)
def test_grammars_over_the_limits(text: str, what: str) -> None:
    with pytest.raises(ConstraintTooLarge, match=what):
        SMALL.check_grammar(text, "grammar")


@pytest.mark.parametrize("piece", ["(", "[", "{1", "\\", '"', "/", "[^", "(a{2}", "\\x{", "#", "//", '"\\', "~", "a:"])
def test_time_is_linear_in_the_length(piece: str) -> None:
    # Quadratic would be hours for half a megabyte: the suite's own timeout is what fails here.
    text = piece * (DEFAULT_LIMITS.max_constraint_bytes // len(piece))
    unlimited = Limits(max_nesting=10**9, max_repetition=10**9, max_grammar_rules=10**9)
    unlimited.check_regex(text, "regex")
    unlimited.check_grammar(text, "grammar")
    unlimited.check_grammar(f"{text} root ::= a", "grammar")


@settings(deadline=None)
@given(st.text("()[]{}\\\"'/#^-,0123456789abx~.:=\n ", max_size=200))
def test_nothing_but_a_refusal_comes_out(text: str) -> None:
    for check in (SMALL.check_regex, SMALL.check_grammar):
        with contextlib.suppress(ConstraintTooLarge):
            check(text, "regex")
