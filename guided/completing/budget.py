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
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a map of names to schemas as their value."""
_VALUES = ("const", "enum", "default", "example", "examples")
"""Keywords with a value that is no schema."""
_UNREADABLE = (GuidedError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


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
    # Longer constraints are not estimated.
    if constraint.kind == "choice" or len(constraint.source) <= 32 << 10:
        with contextlib.suppress(
            GuidedError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
        ):
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
            jump, node = _worst(constraint.source), _parsed(constraint.source)
            hint = _text(node) if node is not None and _rest(node)[0] <= _MAX_HINT else ""
        case "grammar" | "structural_tag":
            jump = len(constraint.source)
            for count in re.findall(r"\{(\d{1,6})", constraint.source):
                jump = min(jump * max(1, int(count)), _MAX_JUMP)
    jump = min(jump, _MAX_JUMP)
    return Budget(0, jump, jump, jump, hint)


def _of_schema(schema: Any) -> Budget:
    sizes = _Sizes(schema)
    inside = _subschemas(schema) if isinstance(schema, Mapping) else ()
    jump = max(map(sizes.of, inside), default=0) + _MARGIN
    has_patterns = re.search(r'"(pattern|patternProperties|format|propertyNames)":', json.dumps(schema))
    hint = ""
    with contextlib.suppress(*_UNREADABLE):
        hint = _json(_Instances(schema).of(schema))
    first = max(jump, sizes.of(schema))
    return Budget(0, first, jump, jump if has_patterns else 0, hint if len(hint) <= _MAX_HINT else "")


def _worst(pattern: str) -> int:
    """Return the size in bytes of the shortest rest of a match, after the worst prefix."""
    node = _parsed(pattern)
    return len(pattern) if node is None else _rest(node)[1]


@lru_cache(maxsize=4)
def _parsed(pattern: str) -> regex.Node | None:
    try:
        return parse(pattern, lookaheads=False)
    except GuidedError:  # refused when it is compiled
        return None


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


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas within a schema."""
    for keyword, value in schema.items():
        values = value.values() if keyword in _MAPS else value if isinstance(value, list) else [value]
        for each in values if keyword not in _VALUES else ():
            if isinstance(each, Mapping):
                yield each
                yield from _subschemas(each)


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
            applied = [*schema.get("allOf", ()), schema.get("then"), schema.get("else"), _target(self._root, schema)]
            size = _scalar(schema) + self._object(schema) + self._array(schema) + sum(map(self.of, applied))
            size += max(map(self.of, [*schema.get("anyOf", ()), *schema.get("oneOf", ())]), default=0)
            self._known[id(schema)] = min(size, _MAX_JUMP)
        return self._known[id(schema)]

    def _object(self, schema: Mapping[str, Any]) -> int:
        required = set(schema.get("required", ()))
        members = {name: len(name) + 4 + self.of(each) for name, each in schema.get("properties", {}).items()}
        others = [len(pattern) + self.of(each) for pattern, each in schema.get("patternProperties", {}).items()]
        others += [size for name, size in members.items() if name not in required]
        more = max([*others, self.of(schema.get("additionalProperties"))])
        least = sum(members.get(name, len(name) + 4) for name in required)
        return least + more + int(schema.get("minProperties", 0)) * (8 + more)

    def _array(self, schema: Mapping[str, Any]) -> int:
        items = schema.get("items")
        prefix = sum(
            self.of(each) + 1 for each in (*schema.get("prefixItems", ()), *(items if isinstance(items, list) else ()))
        )
        item = max(map(self.of, (items, schema.get("additionalItems"), schema.get("contains"))))
        return prefix + item + int(schema.get("minItems", 0) + schema.get("minContains", 0)) * (item + 2)


class _Instances:
    """Guesses short instances. A wrong guess does no harm."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = 300  # maximum number of subschemas that are read for a hint

    def of(self, schema: Any) -> Any:
        """Return a value that may be a short instance of `schema`."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return 0
        if "const" in schema:
            return schema["const"]
        if "$ref" in schema:
            return self.of(_target(self._root, schema))
        options = schema.get("enum") or [
            self.of({**schema, "anyOf": (), "oneOf": (), **each})
            for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
        ]
        if options:
            return min(options, key=lambda value: len(_json(value)))
        for each in schema.get("allOf", ()):
            schema = {**schema, **each}
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object" or "properties" in schema:
            properties, required = schema.get("properties", {}), schema.get("required", ())
            names = dict.fromkeys([*filter(required.__contains__, properties), *required])
            return {name: self.of(properties.get(name)) for name in names}
        if kind == "array":
            count = min(schema.get("minItems", 0), 99)
            schemas = [*schema.get("prefixItems", ()), *[schema.get("items")] * count][:count]
            return [self.of(each) for each in schemas]
        if kind == "string":
            return "a" * min(schema.get("minLength", 0), _MAX_HINT)
        return {"null": None, "boolean": True}.get(kind, math.ceil(schema.get("minimum", 0)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _target(root: Any, schema: Mapping[str, Any]) -> Any:
    """Return the target of a `$ref` within the document; None if it is elsewhere."""
    reference, target = schema.get("$ref"), root
    if reference is None or not reference.startswith("#"):
        return None
    for step in filter(None, reference[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        target = target[int(step) if isinstance(target, list) else step]
    return target


def _scalar(schema: Mapping[str, Any]) -> int:
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    size = max((len(json.dumps(value, ensure_ascii=False).encode()) for value in values), default=0)
    size += _worst(schema["pattern"].strip("^$")) if "pattern" in schema else 0
    numbers = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    digits = max((len(str(schema[key])) for key in numbers if key in schema), default=0)
    return size + int(schema.get("minLength", 0)) + 2 * digits + (48 if "format" in schema else 0) + 2
