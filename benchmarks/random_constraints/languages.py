"""Random regexes, choices and grammars, each with a check of its outputs that does not
use `guided`."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex as unicode_regex
from lark import Lark
from lark.exceptions import UnexpectedInput

from guided.constraint import Constraint

_LITERALS = [
    "a",
    "b",
    "0",
    "-",
    " ",
    "é",
    "狐",
    "😀",
    ":",
    "/",
    ",",
    "_",
    "~",
    "&",
    '"',
    r"\\",
    r"\.",
    r"\n",
    r"\t",
]
_LITERALS += [r"\x01", r"\x1b", r"\x7f", r"\u0085", r"\u2028", r"\uffff"]
_CLASSES = [
    *(
        "[ab]",
        "[^a]",
        "[a-z]",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        ".",
        r"[\d-]",
        r"[^\W_]",
        r"[\x00-\x1f]",
    ),
    *(
        r"[\x00-\x21]",
        r"[\x01-\x08]",
        r"[^\x20-\uffff]",
        r'["\\]',
        "[[:alpha:]]",
        "[[:^digit:]]",
        "[[:space:]a]",
    ),
    *(
        "[a&&b]",
        "[a||b]",
        "[a~~b]",
        "[[a]",
        r"[\]x]",
        "[é-ü]",
        "[😀-😎]",
        r"[\b]",
        r"\x7f",
        r"[^\n]",
    ),
    *(
        r"[^\s\d]",
        "[+--]",
        r"\u0041",
        r"\x41",
        r"\/",
        r"\-",
        r"[\w.-]",
        r"[\u00e0-\u00ff]",
        r"[^\W\d]",
        r"[\s\S]",
    ),
]
_PROPERTIES = [
    r"\p{L}",
    r"\p{Lu}",
    r"\P{L}",
    r"\p{Script=Greek}",
    r"[\p{Nd}_]",
    r"[^\p{L}]",
]
"""Properties that Python's `re` cannot read."""
_FRAMES = [
    "^{}$",
    "(?i:{})",
    "(?s:{})",
    "(?a:{})",
    "(?i){}",
    "(?P<n>{})",
    "^(?:a|{})$",
    r"\A{}\Z",
    "(^{}$|b)",
]
_FRAMES += ["{}$", "()|{}"]


@dataclass(frozen=True)
class Case:
    """A random constraint, and a check that returns why an output is wrong, or None."""

    kind: str
    value: Any
    constraint: Callable[[], Constraint]
    problem: Callable[[str], str | None]


def pattern(source: random.Random, depth: int = 3) -> str:
    """Return a random regex that Python and ECMA-262 can read, without anchors."""
    draw = source.random()
    if depth == 0 or draw < 0.35:
        return source.choice(source.choice([_LITERALS, _CLASSES]))
    if draw < 0.6:
        return "".join(pattern(source, depth - 1) for _ in range(source.randint(1, 3)))
    if draw < 0.75:
        return f"(?:{'|'.join(pattern(source, depth - 1) for _ in range(source.randint(2, 3)))})"
    count = source.choice(
        ["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "*?", "+?", "{1,3}?"]
    )
    count = (
        count
        if source.random() < 0.95
        else source.choice(["{20}", "{5,40}", "{0,100}", "{30,}"])
    )
    return f"(?:{pattern(source, depth - 1)}){count}"


def random_regex(source: random.Random) -> Case:
    """Return a regex whose output is a full match, in Python's reading."""
    text = pattern(source)
    if source.random() < 0.25:
        text = source.choice(_FRAMES).replace("{}", text)
    compiled: Any
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "possible nested set"
        compiled = re.compile(text)
    if source.random() < 0.1:
        text = f"[a-c]?{source.choice(_PROPERTIES)}{{1,3}}(?:{source.choice(_PROPERTIES)}|-)*"
        compiled = unicode_regex.compile(text)

    def problem(output: str) -> str | None:
        return None if compiled.fullmatch(output) else "no full match"

    return Case("regex", text, lambda: Constraint.regex(text), problem)


def random_choice(source: random.Random) -> Case:
    """Return a list of texts, some of which begin like others."""
    letters = ["a", "b", '"', "\\", "\n", "é", "😀", " ", "{", "\x7f", "\t"]
    options = [
        "".join(source.choices(letters, k=source.randint(1, 5)))
        for _ in range(source.randint(1, 8))
    ]

    def problem(output: str) -> str | None:
        return None if output in options else "no option"

    return Case("choice", options, lambda: Constraint.choice(options), problem)


_COUNTS = {"{2}": "~2", "{1,2}": "~1..2", "{0,3}": "~0..3", "{2,}": "~2..150"}
"""Counts of repetitions -> the parser's notation, which needs a limit. No output
reaches this limit."""


def random_grammar(source: random.Random) -> Case:
    """Return a grammar of a few rules, in GBNF or Lark; some rules refer to themselves
    between brackets."""
    if source.random() < 0.35:
        return _random_lark(source)
    names = ["root", "one", "two", "three"][: source.randint(1, 4)]
    rules: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        rules[name] = [
            _items(source, names[index + 1 :]) for _ in range(source.randint(1, 3))
        ]
        if source.random() < 0.4:
            rules[name].append(f'"(" {name} ")"')
    lark = source.random() < 0.5
    text = grammar(rules, lark=lark)
    counted = grammar(rules)
    for count, notation in _COUNTS.items():
        counted = counted.replace(count, notation)
    return Case(
        "grammar", text, lambda: Constraint.grammar(text), _parsed_by_lark(counted)
    )


def _items(source: random.Random, later: list[str]) -> str:
    """Return items: the name of a later rule, a text in quotes, or a class; then `*`,
    `+`, `?` or `{m,n}`."""
    texts = [
        '"a"',
        '"b"',
        '"ab"',
        '"é"',
        '"😀x"',
        '" "',
        '"0"',
        '"-"',
        '"\\\\"',
        '"\\""',
        '"\\n"',
    ]
    texts += ["[a-c]", r'[^"\\]', "[é-ü0]", r"[\n\t]"]
    items = []
    for _ in range(source.randint(1, 3)):
        item = (
            source.choice(later)
            if later and source.random() < 0.6
            else source.choice(texts)
        )
        items.append(item + source.choice(["", "", "", "", "*", "+", "?", *_COUNTS]))
    return " ".join(items)


def grammar(rules: dict[str, list[str]], *, lark: bool = True) -> str:
    """Return rules, each a list of alternatives, as the text of a grammar."""
    lines = []
    for name, alternatives in rules.items():
        line = f"{name} {':' if lark else '::='} {' | '.join(alternatives)}"
        lines.append(
            re.sub(r"\broot\b", "start", re.sub(r"(\[[^\]]*\])", r"/\1/", line))
            if lark
            else line
        )
    return "\n".join(lines) + "\n"


def _parsed_by_lark(text: str) -> Callable[[str], str | None]:
    parser = Lark(
        text, parser="earley", lexer="dynamic_complete", ambiguity="resolve", regex=True
    )

    def problem(output: str) -> str | None:
        try:
            parser.parse(output)
        except UnexpectedInput as error:
            return f"no sentence: {type(error).__name__}"
        return None

    return problem


_TERMINALS = {
    "NAME": "/[a-z]+/",
    "NUMBER": r"/-?\d+(\.\d+)?/",
    "TEXT": r'/"[^"\\\n]*"/',
    "KEYWORD": '"if"i',
    "HEX": "/0x[0-9a-fA-F]{2,4}/",
    "LETTERS": '("a".."c")+ "é"?',
    "ANY.2": r"/[^x\s][^x\s]?/",
}


def _random_lark(source: random.Random) -> Case:
    """Return a grammar with the features of Lark: terminals, imports, `%ignore`,
    priorities, aliases.

    No terminal begins with a blank: the parser ignores as many of them as there are.
    """
    names = source.sample([*_TERMINALS], 3)
    first, second, third = (name.partition(".")[0] for name in names)
    separator, least = (
        source.choice(['","', '"=>"', "second?"]),
        source.choice(["?", "*", "+", ""]),
    )
    lines = [
        f"start: item ({separator} item){least}",
        source.choice(
            [
                f'item: {first} | {first} ":" value -> pair',
                f"?item: value | {first} [{second}]",
            ]
        ),
        source.choice(
            [
                f'value: {second} | "(" value? ")"',
                f'!value: {third} | "[" [value ("," value)*] "]"',
            ]
        ),
        f"second: {third}",
        *(f"{name}: {_TERMINALS[name]}" for name in names),
    ]
    lines += source.choice(
        [
            [],
            [],
            ['%ignore " "'],
            [r"%ignore /[ \t]+/"],
            ["%import common.WS", "%ignore WS"],
        ]
    )
    text = "\n".join(lines) + "\n"
    return Case("lark", text, lambda: Constraint.grammar(text), _parsed_by_lark(text))
