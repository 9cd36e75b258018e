"""Grammars: detection of Lark and GBNF/EBNF, and conversion of GBNF to Lark for llguidance.

GBNF (of llama.cpp) is a grammar over characters. Lark has a lexer, and llguidance's lexer takes the longest lexeme: in
`word "x"` with `word ::= [a-z]+`, the `x` would never be reached. So lexemes must be *prefix-free*: no text of a lexeme
is a prefix of another one. A grammar without recursion becomes a single regex. In other grammars, regular and
prefix-free parts (a quoted string, a keyword) become lexemes; elsewhere every character is a lexeme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import combinations
from typing import Literal

import interegular
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.limits import GBNF_RULE
from guided.regex import Chars, Choice, Node, Ranges, Reference, Repeat, Sequence

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

_ESCAPED = frozenset("\"'\\[]^-/.?*+(){}|$")
"""Characters that stand for themselves after a backslash."""

_LARK_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)|(?P<special><[^<>\s]+>)""", re.DOTALL
)

_MAX_NODES = 2_000
"""Maximum number of nodes of a rule that becomes one regex, with repetitions expanded."""

_MAX_PIECES = 8
"""Maximum number of items of a sequence that are tried as one lexeme."""

Rules = dict[str, Node]


def syntax(text: str) -> Literal["lark", "gbnf"]:
    """Return the notation of `text`: only GBNF/EBNF has `name ::= …` at the start of a line."""
    return "gbnf" if GBNF_RULE.search(text) else "lark"


def to_lark(text: str) -> str:
    """Return `text` as Lark for llguidance; GBNF is converted.

    Raises:
        InvalidConstraint: GBNF with a syntax error, an undefined rule, or no `root`.
        UnsupportedConstraint: Lark that refers to special tokens, which guided output never contains.
    """
    if syntax(text) == "gbnf":
        return _Converter(parse_gbnf(text)).lark()
    for found in _LARK_TOKEN.finditer(text):
        if found["special"]:
            raise UnsupportedConstraint(
                f"the grammar refers to the special token {bounded(found['special'], 60)}:"
                " guided output never contains special tokens",
                param="grammar",
            )
    return text


def regular(text: str) -> Node | None:
    """Return a grammar in GBNF without recursion as one regex; None for others. Raises as `to_lark` does."""
    return _Converter(parse_gbnf(text)).whole if syntax(text) == "gbnf" else None


def _invalid(message: str) -> InvalidConstraint:
    return InvalidConstraint(message, param="grammar")


def parse_gbnf(text: str) -> Rules:
    """Parse GBNF into the rules that `root` reaches, including `root`. Raises as `to_lark` does."""
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
                return regex.literal("".join(chr(code) for code, _ in _characters(tree[1:-1])))
            case "CLASS":
                return _char_class(tree[1:-1])
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


def _char_class(text: str) -> Node:
    negated = text.startswith("^")
    pairs: list[tuple[int, int]] = []
    tokens = list(_characters(text[negated:]))
    index = 0
    while index < len(tokens):
        low = tokens[index][0]
        if index + 2 < len(tokens) and tokens[index + 1] == (ord("-"), False):
            pairs.append((low, tokens[index + 2][0]))
            index += 3
        else:
            pairs.append((low, low))
            index += 1
    if any(high < low for low, high in pairs):
        raise _invalid(f"the character class [{bounded(text, 60)}] of the grammar is out of order")
    ranges = regex.complement(regex.ranges_of(pairs)) if negated else regex.ranges_of(pairs)
    if not ranges:
        raise _invalid(f"no character is in the class [{bounded(text, 60)}] of the grammar")
    return Chars(ranges)


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """Yield the code points of a literal or a class, and whether each was escaped."""
    index = 0
    while index < len(text):
        if text[index] != "\\":
            yield ord(text[index]), False
            index += 1
            continue
        letter = text[index + 1]
        width = {"x": 2, "u": 4, "U": 8}.get(letter, 0)
        digits = text[index + 2 : index + 2 + width]
        if width and re.fullmatch(rf"[0-9A-Fa-f]{{{width}}}", digits):
            code = int(digits, 16)
        elif letter in "nrt":
            code = ord({"n": "\n", "r": "\r", "t": "\t"}[letter])
        elif letter in _ESCAPED:
            code = ord(letter)
        else:
            code = -1
        if code < 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _invalid(f"the grammar contains an unknown escape, \\{bounded(letter + digits, 12)}")
        yield code, True
        index += 2 + width


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


class _Converter:
    """GBNF rules to Lark text."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._regular: dict[str, Node | None] = {}
        for name in rules:
            self._expand_rule(name, ())
        self._apart: set[Node] = set()
        """Regular nodes that are no lexeme; their parts may be lexemes."""

    @property
    def whole(self) -> Node | None:
        """The whole grammar as one regex, if it is one."""
        return self._regular[ROOT]

    def lark(self) -> str:
        whole = self.whole
        if whole is not None:
            return f"start: WHOLE\nWHOLE: {slashed(whole)}\n" if whole != regex.EMPTY else 'start: ""\n'
        while True:
            lexemes: dict[Node, str] = {}
            names = {name: "start" if name == ROOT else f"r{index}" for index, name in enumerate(self._rules)}
            lines = [f"{names[name]}: {self._emit(body, lexemes, names)}" for name, body in self._rules.items()]
            clashing = self._clashing(list(lexemes))
            if not clashing:
                break
            self._apart |= clashing
        lines += [f"{name}: {slashed(node)}" for node, name in lexemes.items()]
        return "\n".join(lines) + "\n"

    def _emit(self, node: Node, lexemes: dict[Node, str], names: dict[str, str]) -> str:
        if (lexeme := self._lexeme(node)) is not None:
            return lexemes.setdefault(lexeme, f"T{len(lexemes)}")
        match node:
            case Reference(name):
                return names[name]
            case Choice(options):
                return "(" + " | ".join(self._emit(option, lexemes, names) for option in options) + ")"
            case Repeat(item, low, high):
                bounds = f"{{{low},{'' if high is None else high}}}"
                return f"({self._emit(item, lexemes, names)}){bounds}"
            case Sequence(items):
                return " ".join(self._emit(piece, lexemes, names) for piece in self._pieces(items)) or '""'
        raise AssertionError(node)

    def _pieces(self, items: tuple[Node, ...]) -> Iterator[Node]:
        """Yield `items`, with the longest runs that can be a lexeme combined."""
        start = 0
        while start < len(items):
            longest = min(len(items), start + _MAX_PIECES)
            ends = (end for end in range(longest, start + 1, -1) if items[start:end] != items)
            end = next((end for end in ends if self._lexeme(Sequence(items[start:end])) is not None), start + 1)
            yield items[start] if end == start + 1 else Sequence(items[start:end])
            start = end

    def _lexeme(self, node: Node) -> Node | None:
        """Return `node` without references if it can be a lexeme (one character always can)."""
        expanded = self._expand(node, ())
        if expanded is None or isinstance(expanded, Chars):
            return expanded
        return expanded if expanded not in self._apart and _prefix_free(expanded) else None

    def _clashing(self, lexemes: list[Node]) -> set[Node]:
        """Return lexemes of several characters that are a prefix of another one, or have one as a prefix."""
        clashing: set[Node] = set()
        for (right, other), (left, first) in combinations([(lexeme, _first(lexeme)) for lexeme in lexemes], 2):
            characters = isinstance(left, Chars) + isinstance(right, Chars)
            if characters == 2 or not regex.intersection(first, other):
                continue
            if characters or not _prefix_free(regex.choice((left, right))):  # a character is a prefix of what it begins
                clashing.add(max(left, right, key=_size))
        return clashing

    def _expand_rule(self, name: str, within: tuple[str, ...]) -> Node | None:
        if name in within:
            return None
        if name not in self._regular:
            self._regular[name] = self._expand(self._rules[name], (*within, name))
        return self._regular[name]

    def _expand(self, node: Node, within: tuple[str, ...]) -> Node | None:
        """Replace every reference by its rule; None if that is recursive or too large."""

        def expanded(leaf: Chars | Reference) -> Node:
            rule = self._expand_rule(leaf.name, within) if isinstance(leaf, Reference) else leaf
            if rule is None:
                raise _Irregular
            return rule

        try:
            whole = regex.map_leaves(node, expanded)
        except _Irregular:
            return None
        return whole if _size(whole) <= _MAX_NODES else None


class _Irregular(Exception):
    """A rule is recursive or too large for one regex."""


@lru_cache(maxsize=4096)
def _size(node: Node) -> int:
    match node:
        case Sequence(inner) | Choice(inner):
            return 1 + sum(map(_size, inner))
        case Repeat(item, low, high):
            return _size(item) * max(low, high or 1, 1)
    return 1


def _first(node: Node) -> Ranges:
    """Return the possible first characters of `node` (regular)."""
    match node:
        case Chars(ranges):
            return ranges
        case Choice(options):
            return regex.ranges_of(pair for option in options for pair in _first(option))
        case Repeat(item):
            return _first(item)
        case Sequence(items):
            pairs: list[tuple[int, int]] = []
            for item in items:
                pairs.extend(_first(item))
                if not regex.nullable(item):
                    break
            return regex.ranges_of(pairs)
    raise AssertionError(node)


@lru_cache(maxsize=4096)
def _prefix_free(node: Node) -> bool:
    """Whether no text of `node` (regular) is a prefix of another one. The empty text is a prefix of all."""
    if regex.nullable(node) or _size(node) > _MAX_NODES:
        return False
    machine = interegular.parse_pattern(regex.render(node)).to_fsm()
    return not any(machine.islive(target) for final in machine.finals for target in machine.map.get(final, {}).values())


def slashed(node: Node) -> str:
    """Write `node` as a regex of Lark."""
    return "/" + regex.render(node).replace("/", r"\/") + "/"
