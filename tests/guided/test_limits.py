"""Sizes are measured in one pass over any text, well formed or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge
from guided.limits import LIMITS, CompileLimits, Limits

SMALL = Limits(max_nesting=3, max_repetition=100, max_grammar_rules=3)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{10}){10}",
        "[{101}]",  # in a class, braces are characters
        r"\x{101}a",
        r"\p{Lu}{100}",
        "[((((]",
        "[]((((]",
        "[]a{101}",  # "]" first in a class is a character: all of it is one class
    ],
)
def test_regexes_within_the_limits(pattern: str) -> None:
    SMALL.check_regex(pattern, "regex")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [("a{101}", "beyond the limit of 100"), ("(a{11}){10}", "nested repetitions")],
)
def test_regexes_over_the_limits(pattern: str, what: str) -> None:
    with pytest.raises(ConstraintTooLarge, match=what) as caught:
        SMALL.check_regex(pattern, "structured_outputs.regex")
    assert caught.value.param == "structured_outputs.regex"


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
        ("start: /a{101}/", "101"),
        ("start: a~1..101", "101"),
        ("a ::= b\nb ::= c\nc ::= d\nd ::= e", "4 rules; the limit is 3"),
        ('start: b "::="\nb: c\nc: d\nd: "e"', "4 rules"),
    ],
)
def test_grammars_over_the_limits(text: str, what: str) -> None:
    with pytest.raises(ConstraintTooLarge, match=what):
        SMALL.check_grammar(text, "grammar")


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        "[",
        "{1",
        "\\",
        '"',
        "/",
        "[^",
        "(a{2}",
        "\\x{",
        "#",
        "//",
        '"\\',
        "~",
        "a:",
    ],
)
def test_time_is_linear_in_the_length(piece: str) -> None:
    # Quadratic would be hours for half a megabyte: the suite's own timeout is what
    # fails here.
    text = piece * (LIMITS.max_constraint_bytes // len(piece))
    unlimited = Limits(max_nesting=10**9, max_repetition=10**9, max_grammar_rules=10**9)
    unlimited.check_regex(text, "regex")
    unlimited.check_grammar(text, "grammar")
    unlimited.check_grammar(f"{text} root ::= a", "grammar")


FEW = Limits(max_regex_alternatives=3)


@pytest.mark.parametrize(
    "pattern", ["a|b|c|d", "(a|b)(c|d|e)", "((a|b)|(c|d))", "a|||b"]
)
def test_alternations_over_the_limit_count_together(pattern: str) -> None:
    with pytest.raises(ConstraintTooLarge, match="more than 3 alternatives"):
        FEW.check_regex(pattern, "regex")


def test_a_regex_may_have_as_many_alternatives_as_a_choice() -> None:
    words = [f"w{index}" for index in range(LIMITS.max_choices)]
    Constraint.regex("|".join(words))
    Constraint.json_schema({"pattern": f"^({'|'.join(words)})$"})
    for create in (
        Constraint.regex,
        lambda pattern: Constraint.json_schema({"pattern": pattern}),
    ):
        with pytest.raises(ConstraintTooLarge, match="more than 10000 alternatives"):
            create("|".join([*words, "x"]))


def test_alternatives_of_schemas() -> None:
    many = [{"const": index} for index in range(LIMITS.max_alternatives // 2)]
    Constraint.json_schema({"anyOf": [*many, *many], "enum": list(range(10_000))})
    nested = {
        "properties": {"a": {"anyOf": many}, "b": {"oneOf": [*many, {"type": "null"}]}}
    }
    with pytest.raises(
        ConstraintTooLarge, match="more than 2000 alternatives"
    ) as caught:
        Constraint.json_schema(nested, param="response_format")
    assert (caught.value.param, caught.value.pointer) == (
        "response_format",
        "/properties/b/oneOf",
    )
    # A property that has that name is none.
    values = list(range(LIMITS.max_alternatives + 1))
    Constraint.json_schema(
        {"properties": {"anyOf": {"enum": values}}, "enum": [{"anyOf": values}]}
    )


@pytest.mark.parametrize(
    ("create", "limit"),
    [
        (
            lambda size: Constraint.json_schema({"enum": list(range(size))}),
            LIMITS.max_enum,
        ),
        (
            lambda size: Constraint.json_object(whitespace=f" {{{size}}}"),
            LIMITS.max_repetition,
        ),
        (
            lambda size: Constraint.choice(list(map(str, range(size)))),
            LIMITS.max_choices,
        ),
        (lambda size: Constraint.regex("a" * size), LIMITS.max_constraint_bytes),
    ],
    ids=["enum", "whitespace", "choices", "bytes"],
)
def test_a_limit_holds_from_the_first_value_beyond_it(
    create: Callable[[int], Constraint], limit: int
) -> None:
    create(limit)
    with pytest.raises(ConstraintTooLarge):
        create(limit + 1)


def test_limits_that_nothing_can_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds is 0; it must be at least 0\.001"):
        CompileLimits(seconds=0)
