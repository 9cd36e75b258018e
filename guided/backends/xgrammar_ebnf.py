"""Texts and regexes in xgrammar's notation for grammars."""

from __future__ import annotations

from guided.regex import Chars, Choice, Node, Repeat, Sequence


def quoted(text: str) -> str:
    """Return the literal `text`."""
    special = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(special.get(c, c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


def ebnf(node: Node) -> str:
    """Return `node` as the right side of a rule."""
    match node:
        case Chars(ranges):
            return "[" + "".join(_range(low, high) for low, high in ranges) + "]"
        case Sequence(items):
            return f"({' '.join(map(ebnf, items))})" if items else '""'
        case Choice(options):
            return f"({' | '.join(map(ebnf, options))})"
        case Repeat(item, 0, 1):
            return f'({ebnf(item)} | "")'
        case Repeat(item, low, None):
            return f"({ebnf(item)}){ {0: '*', 1: '+'}.get(low, f'{{{low},}}') }"
        case Repeat(item, low, high):
            return f"({ebnf(item)}){{{low},{high}}}"
    raise TypeError(f"{type(node).__name__} in a regex")


def _range(low: int, high: int) -> str:
    return f"\\U{low:08x}" + (f"-\\U{high:08x}" if high > low else "")
