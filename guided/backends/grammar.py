"""Grammars: detection of Lark and GBNF/EBNF, and what is refused of Lark.

GBNF (of llama.cpp) is a grammar over characters, as xgrammar reads it. llguidance reads
Lark only: its lexer takes the longest lexeme, so in `word "x"` with `word ::= [a-z]+`,
the `x` would never be reached.
"""

from __future__ import annotations

import re
from typing import Literal

from guided.errors import UnsupportedConstraint, bounded
from guided.regex import tree as regex

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_][\w-]*\s*::=", re.MULTILINE)
"""A rule at the start of a line. A grammar without one is in Lark."""
_LARK_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)|(?P<special><[^<>\s]+>)""",
    re.DOTALL,
)


def syntax(text: str) -> Literal["lark", "gbnf"]:
    """Return the notation of `text`: only GBNF/EBNF has `name ::= …` at the start of a
    line."""
    if _GBNF_RULE.search(text):
        return "gbnf"
    return "lark"


def check_lark(text: str) -> str:
    """Return `text` if it is Lark that llguidance can enforce.

    Raises:
        UnsupportedConstraint: it is GBNF, or refers to special tokens, which guided
            output never contains.
    """
    if syntax(text) == "gbnf":
        raise UnsupportedConstraint(
            "llguidance reads Lark only, and GBNF is for xgrammar", param="grammar"
        )
    for token in _LARK_TOKEN.finditer(text):
        if token["special"]:
            raise UnsupportedConstraint(
                f"the grammar refers to the special token {bounded(token['special'], 60)}:"
                " guided output never contains special tokens",
                param="grammar",
            )
    return text


def slashed(node: regex.Node) -> str:
    """Write `node` as a regex of Lark."""
    return "/" + regex.render(node).replace("/", r"\/") + "/"
