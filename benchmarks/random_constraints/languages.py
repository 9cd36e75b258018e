"""Random regexes, choices and grammars, each with a check of its outputs that does not use `guided`."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from guided.constraint import Constraint

_LITERALS = ["a", "b", "0", "-", " ", "é", "狐", "😀", ":", "/", ",", "_", "~", "&", '"', r"\\", r"\.", r"\n", r"\t"]
_CLASSES = [
    *("[ab]", "[^a]", "[a-z]", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"[\d-]", r"[^\W_]", r"[\x00-\x1f]"),
    *(r"[\x00-\x21]", r"[\x01-\x08]", r"[^\x20-\uffff]", r'["\\]', "[[:alpha:]]", "[[:^digit:]]", "[[:space:]a]"),
    *("[a&&b]", "[a||b]", "[a~~b]", "[[a]", r"[\]x]", "[é-ü]", "[😀-😎]", r"[\b]", r"\x7f", r"[^\n]"),
    *(r"[^\s\d]", "[+--]"),
]


@dataclass(frozen=True)
class Case:
    """A random constraint and the check of an output: why it is wrong, or None."""

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
    count = source.choice(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "*?", "+?", "{1,3}?"])
    return f"(?:{pattern(source, depth - 1)}){count}"


def random_regex(source: random.Random) -> Case:
    """Return a regex whose output is a full match, in Python's reading."""
    text = pattern(source)
    if source.random() < 0.2:
        text = source.choice(["^{}$", "(?i:{})", "(?s:{})", "(?a:{})"]).replace("{}", text)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "possible nested set"
        compiled = re.compile(text)

    def problem(output: str) -> str | None:
        return None if compiled.fullmatch(output) else "no full match"

    return Case("regex", text, lambda: Constraint.regex(text), problem)


def random_choice(source: random.Random) -> Case:
    """Return a list of texts, some of which begin like others."""
    letters = ["a", "b", '"', "\\", "\n", "é", "😀", " ", "{", "\x7f", "\t"]
    options = ["".join(source.choices(letters, k=source.randint(1, 5))) for _ in range(source.randint(1, 8))]

    def problem(output: str) -> str | None:
        return None if output in options else "no option"

    return Case("choice", options, lambda: Constraint.choice(options), problem)


Rule = list[list[str]]
"""Alternatives of items. An item is the name of a later rule, or a text in quotes, with `*`, `+` or `?` after it."""


def random_grammar(source: random.Random) -> Case:
    """Return a grammar of a few rules, in GBNF or Lark; some rules refer to themselves between brackets."""
    names = ["root", "one", "two", "three"][: source.randint(1, 4)]
    rules: dict[str, Rule] = {}
    for index, name in enumerate(names):
        alternatives = [_items(source, names[index + 1 :]) for _ in range(source.randint(1, 3))]
        if source.random() < 0.4:
            alternatives.append(['"("', name, '")"'])
        rules[name] = alternatives
    lark = source.random() < 0.5
    text = grammar(rules, lark=lark)

    def problem(output: str) -> str | None:
        return None if len(output) in _ends(rules, "root", output, 0) else "no sentence"

    return Case("grammar", text, lambda: Constraint.grammar(text), problem)


def _items(source: random.Random, later: list[str]) -> list[str]:
    texts = ['"a"', '"b"', '"ab"', '"é"', '"😀x"', '" "', '"0"', '"-"', '"\\\\"', '"\\""', '"\\n"']
    items = []
    for _ in range(source.randint(1, 3)):
        item = source.choice(later) if later and source.random() < 0.6 else source.choice(texts)
        items.append(item + source.choice(["", "", "", "*", "+", "?"]))
    return items


def grammar(rules: dict[str, Rule], *, lark: bool) -> str:
    """Return rules as the text of a grammar."""
    defines, start = (":", "start") if lark else ("::=", "root")
    lines = []
    for name, alternatives in rules.items():
        body = " | ".join(" ".join(re.sub("^root", start, item) for item in items) for items in alternatives)
        lines.append(f"{start if name == 'root' else name} {defines} {body}")
    return "\n".join(lines) + "\n"


def _ends(rules: dict[str, Rule], name: str, text: str, start: int) -> set[int]:
    """Return where a sentence of the rule `name` that begins at `start` may end."""
    return {end for items in rules[name] for end in _sequence_ends(rules, items, text, start)}


def _sequence_ends(rules: dict[str, Rule], items: list[str], text: str, start: int) -> set[int]:
    reached = {start}
    for item in items:
        count = item[-1] if item[-1] in "*+?" and len(item) > 1 else ""
        base = item[: len(item) - len(count)]
        once = _after(rules, base, text, reached)
        repeated = once
        while count in ("*", "+") and (more := _after(rules, base, text, repeated) - repeated):
            repeated = repeated | more
        reached = repeated | reached if count in ("*", "?") else repeated
    return reached


def _after(rules: dict[str, Rule], base: str, text: str, starts: set[int]) -> set[int]:
    if base[0] != '"':
        return {end for start in starts for end in _ends(rules, base, text, start)}
    literal = base[1:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
    return {start + len(literal) for start in starts if text.startswith(literal, start)}
