"""Grammars: detection of Lark and GBNF/EBNF, what is refused of them, and the rules of GBNF.

GBNF (of llama.cpp) is a grammar over characters, as xgrammar reads it. llguidance reads Lark only: its lexer takes the
longest lexeme, so in `word "x"` with `word ::= [a-z]+`, the `x` would never be reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.limits import GBNF_RULE
from guided.regex import Chars, Choice, Node, Reference, Repeat, Sequence

ROOT = "root"
"""The start rule of a GBNF grammar."""

_GBNF = r"""
start: rule+
rule: HEAD alternatives
alternatives: (branch | nothing) ("|" branch)*
branch: item+
nothing:
item: atom QUANTIFIER?
?atom: STRING | CLASS | NAME | ANY | "(" alternatives ")"
HEAD.2: /[A-Za-z0-9_][\w-]*\s*::=/
NAME: /[A-Za-z0-9_][\w-]*/
STRING: /"(\\.|[^"\\\n])*"/
CLASS: /\[(\\.|[^\]\\\n])*\]/
ANY: "."
QUANTIFIER: /[*+?]|\{\s*\d+\s*(,\s*\d*\s*)?\}/
%ignore /\s+/
%ignore /#[^\n]*/
"""

_ESCAPE = re.compile(
    r"\\(?:x([\da-fA-F]{2})|u((?![dD][89a-fA-F])[\da-fA-F]{4})"
    r"|U((?!0000[dD][89a-fA-F])(?:000[\da-fA-F]|0010)[\da-fA-F]{4})|([nrt\"'\\\[\]^/.?*+(){}|$-])|.{1,9})"
)
"""An escape in a literal or a class: a code point (no surrogate), or a character. An unknown one has no group."""
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}

_LARK_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)|(?P<special><[^<>\s]+>)""", re.DOTALL
)

Rules = dict[str, Node]


def syntax(text: str) -> Literal["lark", "gbnf"]:
    """Return the notation of `text`: only GBNF/EBNF has `name ::= …` at the start of a line."""
    return "gbnf" if GBNF_RULE.search(text) else "lark"


def check_lark(text: str) -> str:
    """Return `text` if it is Lark that llguidance can enforce.

    Raises:
        UnsupportedConstraint: it is GBNF, or refers to special tokens, which guided output never contains.
    """
    if syntax(text) == "gbnf":
        raise UnsupportedConstraint("llguidance reads Lark only, and GBNF is for xgrammar", param="grammar")
    for found in _LARK_TOKEN.finditer(text):
        if found["special"]:
            raise UnsupportedConstraint(
                f"the grammar refers to the special token {bounded(found['special'], 60)}:"
                " guided output never contains special tokens",
                param="grammar",
            )
    return text


def _invalid(message: str) -> InvalidConstraint:
    return InvalidConstraint(message, param="grammar")


def parse_gbnf(text: str) -> Rules:
    """Parse GBNF into the rules that `root` reaches, including `root`.

    Raises:
        InvalidConstraint: a syntax error, an undefined rule, or no `root`.
    """
    try:
        tree = _gbnf_parser().parse(text)
    except UnexpectedInput as error:
        where = f"line {error.line}, column {error.column}"
        near = bounded(error.get_context(text, 20).splitlines()[0].strip(), 60) if error.line > 0 else ""
        raise _invalid(f"the grammar is malformed at {where}, near {near!r}") from None
    rules: Rules = {}
    for rule in tree.children:
        assert isinstance(rule, Tree)
        head, body = rule.children
        name = str(head).removesuffix("::=").strip()
        if name in rules:
            raise _invalid(f"the grammar defines rule {bounded(name, 60)!r} twice")
        rules[name] = _node(body)
    for name, rule_body in rules.items():
        for missing in sorted({*_references(rule_body)} - rules.keys()):
            raise _invalid(
                f"rule {bounded(name, 60)!r} of the grammar refers to {bounded(missing, 60)!r}, which is not defined"
            )
    if ROOT not in rules:
        raise _invalid(f"the grammar has no rule {ROOT!r} to start from")
    return {name: rules[name] for name in _reachable(rules)}


@cache
def _gbnf_parser() -> Lark:
    return Lark(_GBNF, parser="lalr", maybe_placeholders=False)


def _node(tree: Tree[Token] | Token) -> Node:
    if isinstance(tree, Token):
        match tree.type:
            case "STRING":
                _check_escapes(tree)
                return regex.literal(_ESCAPE.sub(_unescaped, tree[1:-1]))
            case "CLASS":
                _check_escapes(tree)
                try:
                    return regex.parse(tree, param="grammar")
                except InvalidConstraint:
                    what = f"the character class {bounded(tree, 60)} of the grammar is malformed, empty or out of order"
                    raise _invalid(what) from None
            case "ANY":
                return Chars(regex.UNIVERSE)
        return Reference(str(tree))
    match tree.data:
        case "alternatives":
            return regex.choice(_node(child) for child in tree.children)
        case "branch" | "nothing":
            return regex.sequence(_node(child) for child in tree.children)
    item = _node(tree.children[0])
    for quantifier in tree.children[1:]:
        item = regex.repeat(item, *_bounds(str(quantifier)))
    return item


def _bounds(quantifier: str) -> tuple[int, int | None]:
    if quantifier in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[quantifier]
    bounds = re.findall(r"\d+", quantifier)
    low, high = int(bounds[0]), int(bounds[-1]) if "," not in quantifier or len(bounds) == 2 else None
    if high is not None and high < low:
        raise _invalid(f"the repetition {quantifier} of the grammar ends before it begins")
    return low, high


def _check_escapes(text: str) -> None:
    for found in _ESCAPE.finditer(text):
        if not any(found.groups()):
            raise _invalid(f"the grammar contains an unknown escape, {bounded(found[0], 12)}")


def _unescaped(escape: re.Match[str]) -> str:
    *codes, character = escape.groups()
    return _CONTROL.get(character, character) or chr(int(next(filter(None, codes)), 16))


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Sequence(inner) | Choice(inner) | Repeat(inner):
            for item in inner if isinstance(inner, tuple) else (inner,):
                yield from _references(item)


def _reachable(rules: Rules) -> list[str]:
    found = [ROOT]
    for name in found:
        found.extend(sorted({*_references(rules[name])}.difference(found)))
    return found


def slashed(node: Node) -> str:
    """Write `node` as a regex of Lark."""
    return "/" + regex.render(node).replace("/", r"\/") + "/"
