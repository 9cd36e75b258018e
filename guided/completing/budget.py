"""Budget: the number of output tokens within which a sequence must complete its constraint."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from guided import regex
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.regex_parser import parse

_MARGIN = 24
"""Tokens that a JSON value can need beyond the estimate: an escape, the rest of a number, closing brackets."""
_MAX_JUMP = 1 << 20
_MAX_HINT = 10_000
"""Maximum length of a hint, in characters."""
_MAX_SOURCE = 32 << 10
"""Maximum length of a constraint that is estimated, in characters."""
_MAX_VALUES = 1_000
"""Maximum number of subschemas that `_Instances` reads to guess one instance."""
_MAX_TEXT = 16 * _MAX_SOURCE
"""Maximum number of characters of JSON that `_Instances` compares or takes over."""


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
    hint: str = ""
    """A text that is probably a short output. The matcher checks whether it is one."""


def budget_of(constraint: Constraint, tokens: int) -> Budget:
    """Return the budget of a sequence. The estimates are generous: they count one token per character.

    They are made in the server's process. So a large constraint, or one that cannot be read, has no estimates: the
    worker then looks for a completion before each token.
    """
    if constraint.kind == "choice" or len(constraint.source) <= _MAX_SOURCE:
        with contextlib.suppress(GuidedError, ValueError, RecursionError, OverflowError):
            return _estimates(constraint)._replace(tokens=tokens)
    return Budget(tokens, _MAX_JUMP, _MAX_JUMP, _MAX_JUMP)


@lru_cache(maxsize=16)
def _estimates(constraint: Constraint) -> Budget:
    hint = ""
    match constraint.kind:
        case "json_schema":
            return _of_schema(json.loads(constraint.source))
        case "json_object":
            return Budget(0, _MARGIN, _MARGIN, 0)
        case "choice":
            jump = max(len(option.encode()) for option in constraint.choices)
            hint = min(constraint.choices, key=len)
        case "regex":
            jump, hint = _worst(constraint.source), _short_match(constraint.source)
        case "grammar" | "structural_tag":
            jump = len(constraint.source)
            for count in re.findall(r"\{(\d{1,6})", constraint.source):
                jump = min(jump * max(1, int(count)), _MAX_JUMP)
    jump = min(jump, _MAX_JUMP)
    return Budget(0, jump, jump, jump, hint)


def _of_schema(schema: Any) -> Budget:
    sizes = _Sizes(schema)
    inner = max((sizes.of(each) for each in _subschemas(schema)), default=0)
    has_patterns = re.search(r'"(pattern|patternProperties|format|propertyNames)":', json.dumps(schema))
    jump = min(inner, _MAX_JUMP) + _MARGIN
    hint = _text_of(_Instances(schema).of(schema))
    first = max(jump, min(sizes.of(schema), _MAX_JUMP))
    return Budget(0, first, jump, jump if has_patterns else 0, hint if len(hint) <= _MAX_HINT else "")


def _worst(pattern: str) -> int:
    """Return the size in bytes of the shortest rest of a match, after the worst prefix."""
    node = _parsed(pattern)
    return len(pattern) if node is None else _rest(node)[1]


def _short_match(pattern: str) -> str:
    """Return a shortest match; empty if there is none, or if it is longer than `_MAX_HINT` bytes."""
    node = _parsed(pattern)
    return _text(node) if node is not None and _rest(node)[0] <= _MAX_HINT else ""


@lru_cache(maxsize=4)
def _parsed(pattern: str) -> regex.Node | None:
    try:
        return parse(pattern, lookaheads=False)
    except GuidedError:  # refused when it is compiled
        return None


def _text(node: regex.Node) -> str:
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
        """Return a generous estimate of the shortest instance of `schema` that begins with the longest options."""
        if not isinstance(schema, Mapping):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0  # for a recursive reference: a finite instance ends the recursion
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
        return self.of(_target(self._root, schema))

    def _object(self, schema: Mapping[str, Any]) -> int:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = dict.fromkeys(name for name in _list(schema.get("required")) if isinstance(name, str))
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


class _Instances:
    """Guesses short instances. A wrong guess does no harm."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_VALUES
        self._text_left = _MAX_TEXT

    def of(self, schema: Any) -> Any:
        """Return a value that may be a short instance of `schema`."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or self._text_left < 0:
            return 0
        if "const" in schema:
            self._length(schema["const"])
            return schema["const"]
        options = _list(schema.get("enum")) or [
            self.of({**schema, **_mapping(each), "anyOf": 0, "oneOf": 0})
            for each in [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
        ]
        if options:
            return min(options, key=self._length)
        if "$ref" in schema:
            return self.of(_target(self._root, schema))
        return self._typed(
            {**schema, **{key: value for each in _list(schema.get("allOf")) for key, value in _mapping(each).items()}}
        )

    def _length(self, value: Any) -> int:
        """Return the length of a value's JSON text, and count it."""
        length = len(_text_of(value))
        self._text_left -= length
        return length

    def _typed(self, schema: Mapping[str, Any]) -> Any:
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object" or (kind is None and "properties" in schema):
            properties = _mapping(schema.get("properties"))
            required = dict.fromkeys(name for name in _list(schema.get("required")) if isinstance(name, str))
            names = dict.fromkeys(name for name in properties if name in required) | required
            found = {name: self.of(properties.get(name)) for name in names}
            return found | {str(index): 0 for index in range(min(_count(schema, "minProperties"), 99) - len(found))}
        if kind == "array" or (kind is None and "items" in schema):
            count = min(max(_count(schema, "minItems"), _count(schema, "minContains")), 99)
            items = [self.of(each) for each in _list(schema.get("prefixItems"))[:count]]
            items += [self.of(schema["contains"])] if "contains" in schema and not items else []
            return items + [self.of(schema.get("items")) for _ in range(count - len(items))]
        if kind == "string":
            pattern = schema.get("pattern")
            text = _short_match(pattern.removeprefix("^").removesuffix("$")) if isinstance(pattern, str) else ""
            self._text_left -= len(text)
            return text.ljust(min(_count(schema, "minLength"), _MAX_HINT), "a")
        return {"null": None, "boolean": True}.get(str(kind), math.ceil(schema.get("minimum", 0)))


def _target(root: Any, schema: Mapping[str, Any]) -> Any:
    """Return the target of a `$ref` within the document; None if it is elsewhere."""
    pointer, target = schema.get("$ref"), root
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    for step in filter(None, pointer[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(step)
        elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
    return target


def _text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
