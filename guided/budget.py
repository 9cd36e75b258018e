"""Budget: the number of output tokens within which a sequence must complete its constraint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from guided import regex
from guided.constraint import Constraint
from guided.errors import GuidedError

_MARGIN = 24
"""Tokens that a value of JSON can need (an escape, the rest of a number, closing brackets), besides what its schema demands."""
_MAX_JUMP = 1 << 20


class Budget(NamedTuple):
    """A limit for one sequence, and estimates of its constraint.

    A *jump* is the number of tokens by which one more token can lengthen the shortest completion: `{` may begin an
    object with twenty required properties.
    """

    tokens: int
    """Maximum number of output tokens, with the stop token."""
    first_jump: int
    """Maximum jump of the first token."""
    jump: int
    """Maximum jump of a later token."""
    text_jump: int
    """Maximum jump of a token that is plain text within a JSON string."""


def budget_of(constraint: Constraint, tokens: int) -> Budget:
    """Return the budget of a sequence. The estimates are generous: tokens are counted as characters."""
    match constraint.kind:
        case "json_schema":
            return _of_schema(json.loads(constraint.source), tokens)
        case "json_object":
            return Budget(tokens, _MARGIN, _MARGIN, 0)
        case "choice":
            jump = max(len(option.encode()) for option in constraint.choices)
        case "regex":
            jump = _worst(constraint.source)
        case "grammar":
            counts = math.prod(max(1, int(count)) for count in re.findall(r"\{(\d{1,6})", constraint.source))
            jump = len(constraint.source) * counts
    jump = min(jump, _MAX_JUMP)
    return Budget(tokens, jump, jump, jump)


def _of_schema(schema: Any, tokens: int) -> Budget:
    sizes = _Sizes(schema)
    inner = max((sizes.of(each) for each in _subschemas(schema)), default=0)
    has_patterns = re.search(r'"(pattern|patternProperties|format|propertyNames)":', json.dumps(schema))
    jump = min(inner, _MAX_JUMP) + _MARGIN
    return Budget(tokens, max(jump, min(sizes.of(schema), _MAX_JUMP)), jump, jump if has_patterns else 0)


def _worst(pattern: str) -> int:
    """Return the maximum over all beginnings of a match of the bytes that the shortest rest takes."""
    try:
        return _rest(regex.parse(pattern))[1]
    except GuidedError:  # refused when it is compiled
        return len(pattern)


def _rest(node: regex.Node) -> tuple[int, int]:
    """Return the bytes of the shortest match, and those of the shortest rest at the worst position."""
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
    return 0, 0


def _subschemas(schema: Any) -> Iterator[Any]:
    """Yield all values within a schema that may be schemas."""
    values = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for value in values:
        if isinstance(value, Mapping):
            yield value
        yield from _subschemas(value)


class _Sizes:
    """Estimates the size of short instances, in characters."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, schema: Any) -> int:
        """Return a generous estimate for the shortest instance of `schema` once it was begun in its longest way."""
        if not isinstance(schema, Mapping):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0  # within itself: a finite instance ends the recursion
            self._known[id(schema)] = min(self._estimate(schema), _MAX_JUMP)
        return self._known[id(schema)]

    def _estimate(self, schema: Mapping[str, Any]) -> int:
        options = [self.of(each) for key in ("anyOf", "oneOf") for each in _list(schema.get(key))]
        parts = [self.of(each) for each in _list(schema.get("allOf"))]
        parts += [self.of(schema.get(key)) for key in ("then", "else")]
        return (
            max(options, default=0)
            + sum(parts)
            + self._reference(schema)
            + _scalar(schema)
            + self._object(schema)
            + self._array(schema)
        )

    def _reference(self, schema: Mapping[str, Any]) -> int:
        target: Any = self._root
        pointer = schema.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return 0
        for step in filter(None, pointer[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(step)
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
        return self.of(target)

    def _object(self, schema: Mapping[str, Any]) -> int:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        size = sum(len(name) + 4 + self.of(properties.get(name)) for name in required)
        optional = [len(name) + 4 + self.of(each) for name, each in properties.items() if name not in required]
        others = [self.of(each) for each in (schema.get("additionalProperties"),)]
        if isinstance(patterns := schema.get("patternProperties"), Mapping):
            others += [len(pattern) + self.of(each) for pattern, each in patterns.items()]
        more = max([*optional, *others])
        return size + more + _count(schema, "minProperties") * (8 + more)

    def _array(self, schema: Mapping[str, Any]) -> int:
        prefix = [self.of(each) + 1 for key in ("prefixItems", "items") for each in _list(schema.get(key))]
        item = max(self.of(schema.get(key)) for key in ("items", "additionalItems", "contains"))
        return sum(prefix) + (_count(schema, "minItems") + _count(schema, "minContains")) * (item + 2) + item


def _scalar(schema: Mapping[str, Any]) -> int:
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    size = max((len(json.dumps(value, ensure_ascii=False).encode()) for value in values), default=0)
    if isinstance(pattern := schema.get("pattern"), str):
        size += _worst(pattern.strip("^$"))
    numbers = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    digits = max((len(str(schema[key])) for key in numbers if key in schema), default=0)
    return size + _count(schema, "minLength") + 2 * digits + (48 if "format" in schema else 0) + 2


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key, 0)
    return int(value) if isinstance(value, int | float) and value > 0 else 0
