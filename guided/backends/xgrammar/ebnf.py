"""Texts, regexes and GBNF in xgrammar's notation for grammars (EBNF)."""

from __future__ import annotations

import re

from guided.regex.parser import parse
from guided.regex.tree import (
    UNIVERSE,
    Chars,
    Choice,
    Concatenation,
    Node,
    Ranges,
    Repeat,
    across_surrogates,
)


def quoted(text: str) -> str:
    """Return the literal `text`."""
    special = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return (
        '"'
        + "".join(special.get(c, c if c >= " " else f"\\u{ord(c):04x}") for c in text)
        + '"'
    )


def exact(grammar: str) -> str:
    """Return a grammar in which each `\\x` has two digits, as xgrammar prints it: it
    reads more, so `é0` is lost."""
    return re.sub(
        r"(\\[^x])|\\x([0-9A-Fa-f]{2})",
        lambda escape: escape[1] or f"\\u00{escape[2]}",
        grammar,
    )


def ebnf(node: Node) -> str:
    """Return `node` as the right side of a rule."""
    match node:
        case Chars(ranges):
            # xgrammar 0.2.8 computes wrong masks for a class with several ranges beyond
            # ASCII behind a repetition, and for a class beyond ASCII behind another
            # one: it allows tokens that it does not accept. Alternatives and counts are
            # right, but masks of repeated ones take 20 ms.
            joined = across_surrogates(ranges)
            parts = [
                _class(((low, high),)) + "{1}" for low, high in joined if high >= 0x80
            ]
            in_ascii = tuple((low, high) for low, high in joined if high < 0x80)
            if in_ascii:
                parts.insert(0, _class(in_ascii))
            return f"({' | '.join(parts)})"
        case Concatenation(items):
            if items:
                return f"({' '.join(map(ebnf, items))})"
            return '""'
        case Choice(options):
            return f"({' | '.join(map(ebnf, options))})"
        case Repeat(item, 0, 1):
            return f'({ebnf(item)} | "")'
        case Repeat(item, low, high):
            if isinstance(item, Chars):
                repeated = _class(across_surrogates(item.ranges))
            else:
                repeated = f"({ebnf(item)})"
            if high is None:
                return repeated + {0: "*", 1: "+"}.get(low, f"{{{low},}}")
            return f"{repeated}{{{low},{high}}}"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"


_GBNF_TOKEN = re.compile(
    r'(?P<skip>#[^\n]*|"(?:\\.|[^"\\\n])*"?)'
    r"|(?P<chars>\[(?:\\.|[^\]\\\n])*\]|\.)(?P<repeated>\s*[*+?{])?"
    r"|(?P<before>::=|\()(?=\s*\|)"
)


def gbnf(text: str) -> str:
    """Return GBNF in xgrammar's notation: without `.` and empty alternatives, and with
    classes that it reads correctly.

    Its other mistakes are for xgrammar to find.

    Raises:
        InvalidConstraint: a class is malformed or empty.
    """

    def rewritten(token: re.Match[str]) -> str:
        if token["before"]:
            return f'{token[0]} ""'
        if not token["chars"]:
            return token[0]
        if token["chars"] == ".":
            return ebnf(Chars(UNIVERSE)) + (token["repeated"] or "")
        node = parse(token["chars"], param="grammar")
        if token["repeated"]:
            return token[0]
        return ebnf(node)

    return exact(_GBNF_TOKEN.sub(rewritten, text))
