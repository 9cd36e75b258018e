"""Estimates of how many tokens a constraint takes, for the budget of a sequence."""

from __future__ import annotations

import contextlib
import json
import re
from functools import lru_cache
from typing import Any

from guided import regex
from guided.completing.budget import Budget
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.regex_parser import parse
from guided.schema.graph import Node, SchemaGraph

_MARGIN = 24
"""Tokens that a JSON value can need beyond the estimate: an escape, the rest of a number, closing brackets."""
_MAX_JUMP = 1 << 20
_MAX_HINT = 2_000
"""Maximum length of a hint, in characters."""
_MAX_SOURCE = 32 << 10
"""Maximum number of characters of a constraint that is estimated."""
_UNREADABLE = (GuidedError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def budget_of(constraint: Constraint, tokens: int) -> Budget:
    """Return the budget of a sequence. The estimates are generous: they count one token per character.

    They are made in the server's process. So a large constraint, or one that can't be read there (a regex with
    lookaheads), has no estimates: the worker then looks for a completion before each token.
    """
    if constraint.kind == "choice" or len(constraint.source) <= _MAX_SOURCE:
        with contextlib.suppress(*_UNREADABLE):
            return _estimates(constraint)._replace(tokens=tokens)
    return Budget(tokens, _MAX_JUMP, _MAX_JUMP, _MAX_JUMP)


@lru_cache(maxsize=16)
def _estimates(constraint: Constraint) -> Budget:
    hint = ""
    match constraint.kind:
        case "json_schema" | "json_object":
            return _of_schema(constraint.schema)
        case "choice":
            jump = max(len(option.encode()) for option in constraint.choices)
            hint = min(constraint.choices, key=len)
        case "regex":
            node = parse(constraint.source, lookaheads=False)
            least, jump = _rest(node)
            hint = _text(node) if least <= _MAX_HINT else ""
        case "grammar" | "structural_tag":
            jump = len(constraint.source)
            for count in re.findall(r"\{(\d{1,6})", constraint.source):
                jump = min(jump * max(1, int(count)), _MAX_JUMP)
    jump = min(jump, _MAX_JUMP)
    return Budget(0, jump, jump, jump, hint)


def _of_schema(schema: Any) -> Budget:
    if not isinstance(schema, dict):
        return Budget(0, _MARGIN, _MARGIN, 0)
    graph, sizes = SchemaGraph(schema), dict[int, int]()
    first = _size(graph.root, sizes) + _MARGIN
    jump = max((_size(node, sizes) for node in graph.nodes() if node is not graph.root), default=0) + _MARGIN
    has_patterns = re.search(r'"(pattern|patternProperties|format|propertyNames)":', json.dumps(schema))
    return Budget(0, max(first, jump), jump, jump if has_patterns else 0)


def _size(node: Node, known: dict[int, int]) -> int:
    """Return a generous estimate of the shortest instance that begins with the longest options, in characters.

    Args:
        known: the sizes of other subschemas, by `id` of the node.
    """
    if id(node) not in known:
        known[id(node)] = 0  # for a recursive reference: a finite instance ends the recursion
        alternatives = [_size(each, known) for keyword, each in node.same if keyword in ("anyOf", "oneOf")]
        applied = [_size(each, known) for keyword, each in node.same if keyword not in ("anyOf", "oneOf", "if", "not")]
        size = _scalar(node.schema) + sum(applied) + max(alternatives, default=0) + _parts(node, known)
        known[id(node)] = min(size, _MAX_JUMP)
    return known[id(node)]


def _parts(node: Node, known: dict[int, int]) -> int:
    """Return the size of the required properties and items, of the longest other one, and of as many as are counted."""
    schema = node.schema
    required = {name: len(name) + 4 for name in schema.get("required", ())}
    least, more = 0, 0
    for part in node.parts:
        keyword, name = part.path[0], str(part.path[-1])
        size = _size(part, known) + len(name) + 4
        is_item = keyword in ("prefixItems", "items") and len(part.path) == 2
        if is_item or (keyword == "properties" and required.pop(name, 0)):
            least += size
        else:
            more = max(more, size)
    counted = sum(int(schema.get(keyword, 0)) for keyword in ("minItems", "minContains", "minProperties"))
    return least + sum(required.values()) + more + counted * (more + 8)


def _scalar(schema: dict[str, Any]) -> int:
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    size = max((len(json.dumps(value, ensure_ascii=False).encode()) for value in values), default=0)
    size += _worst(schema["pattern"].strip("^$")) if "pattern" in schema else 0
    numbers = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    digits = max((len(str(schema[key])) for key in numbers if key in schema), default=0)
    return size + int(schema.get("minLength", 0)) + 2 * digits + (48 if "format" in schema else 0) + 2


def _worst(pattern: str) -> int:
    """Return the size in bytes of the shortest rest of a match, after the worst prefix."""
    try:
        return _rest(parse(pattern, lookaheads=False))[1]
    except GuidedError:  # refused when it is compiled
        return len(pattern)


def _rest(node: regex.Node) -> tuple[int, int]:
    """Return the size in bytes of the shortest match, and that of the shortest rest after the worst prefix."""
    match node:
        case regex.Chars(ranges):
            size = len(chr(ranges[-1][1]).encode())
            return size, size
        case regex.Sequence(items):
            least = worst = 0
            for item in reversed(items):
                shortest, longest = _rest(item)
                worst = max(worst, longest + least)
                least += shortest
            return least, worst
        case regex.Choice(options):
            sizes = [_rest(option) for option in options]
            return min(least for least, _ in sizes), max(worst for _, worst in sizes)
        case regex.Repeat(item, low, _):
            least, worst = _rest(item)
            return least * low, worst + least * max(0, low - 1)


def _text(node: regex.Node) -> str:
    """Return a shortest match."""
    match node:
        case regex.Chars(ranges):
            usual = (each for each in "a0 " if any(low <= ord(each) <= high for low, high in ranges))
            return next(usual, chr(ranges[0][0]))
        case regex.Sequence(items):
            return "".join(map(_text, items))
        case regex.Choice(options):
            return _text(min(options, key=lambda option: _rest(option)[0]))
        case regex.Repeat(item, low, _):
            return _text(item) * low
