"""Detection of Lark and GBNF, and the sentences that xgrammar accepts of GBNF."""

from __future__ import annotations

import pytest
from byte_vocabulary import BYTES, accepts

from guided.backends.grammar import check_lark, syntax
from guided.backends.xgrammar.adapter import XGrammarBackend
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint

BACKEND = XGrammarBackend(BYTES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('root ::= "a"', "gbnf"),
        ('my-rule ::= "a"\nroot ::= my-rule', "gbnf"),
        ('start: "a"', "lark"),
        ('%llguidance {}\nstart: "x ::= y"', "lark"),
        ("start: A\nA: /[a-z]+/ // root ::= no", "lark"),
    ],
)
def test_syntax(text: str, expected: str) -> None:
    assert syntax(text) == expected


def test_lark_is_left_alone() -> None:
    text = 'start: "<s>" /<x>/ // <s>\n# <t>\n'
    assert check_lark(text) == text


@pytest.mark.parametrize(
    "text", ["start: <s>", 'start: "a" <|end|> "b"', "start: A <[12]>\nA: /x/"]
)
def test_special_tokens_are_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=r"special token <"):
        check_lark(text)


def test_gbnf_is_not_for_llguidance() -> None:
    with pytest.raises(UnsupportedConstraint, match="xgrammar"):
        check_lark('root ::= "a"')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('rot ::= "a"', '"root" is not found'),
        ("root ::= missing", '"missing" is not defined'),
        ('root ::= "a"\nb ::= )', "line 2"),
        (r'root ::= "\q"', "escape"),
    ],
)
def test_malformed_gbnf_is_the_users(text: str, said: str) -> None:
    with pytest.raises(InvalidConstraint, match="grammar") as caught:
        BACKEND.compile(Constraint.grammar(text))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            'word ::= [a-z]+\nroot ::= word "x" root | "."',
            [".", "abxx.", "xx."],
            ["x.", "ab."],
        ),
        (
            'root ::= "a" root "b" | "ab" | [a-z] [a-z] "c"',
            ["ab", "aabb", "aabcb", "zzc"],
            ["abb", "aab"],
        ),
        (
            r'root ::= "\x41\u00e9\U0001F600\n\t\"\\" [\]\-^a]',
            ['Aé😀\n\t"\\]', 'Aé😀\n\t"\\-', 'Aé😀\n\t"\\^'],
            ["A"],
        ),
        ("root ::= [^a-z\\n] .", ["A\n", "é😀"], ["ab", "\nx", "A"]),
        (
            'root ::= "a"{2} "b"{1,} "c"{0,1} "d"?',
            ["aab", "aabbbcd"],
            ["ab", "aabccd", "aac"],
        ),
        ('root ::= | "x" | "(" root ")"', ["", "x", "((x))", "()"], ["(", "x)"]),
        ('Root-1 ::= "q"\nroot ::= Root-1 Root-1\n  Root-1', ["qqq"], ["qq"]),
        (
            'root ::= expr\nexpr ::= expr "+" num | num\nnum ::= [0-9]+',
            ["1+22+3", "7"],
            ["1+", "+1"],
        ),
    ],
)
def test_sentences(grammar: str, good: list[str], bad: list[str]) -> None:
    compiled = BACKEND.compile(Constraint.grammar(grammar))
    assert [text for text in (*good, *bad) if accepts(compiled, text)] == good
