"""Literals: texts that a search for a completion tries, because they end a free text or
are a whole output."""

from __future__ import annotations

import re

from guided.constraint import Constraint
from guided.tags.structural_tag import Dispatch, Text, Token, walk

_MOST = 16
_LITERAL = re.compile(r"[^\s\\\"'()\[\]{}|*+?.^$]{2,}")
"""A part of a regex or grammar that is probably literal text."""


def literals(constraint: Constraint) -> list[str]:
    """Return texts that occur in outputs of a constraint, those at its end first."""
    match constraint.kind:
        case "choice":
            return [min(constraint.value, key=len)]
        case "structural_tag":
            texts = list[str]()
            for node in walk(constraint.outline):
                marks = (
                    [mark for mark, _ in node.rules]
                    if isinstance(node, Dispatch)
                    else [node]
                )
                texts += [mark.text for mark in marks if isinstance(mark, Text)]
                texts += [
                    mark.token
                    for mark in marks
                    if isinstance(mark, Token) and isinstance(mark.token, str)
                ]
        case "regex" | "grammar":
            texts = _LITERAL.findall(constraint.source)
        case _:
            return []
    return list(dict.fromkeys(filter(None, texts)))[:_MOST]
