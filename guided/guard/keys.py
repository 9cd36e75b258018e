"""Objects of a schema that may repeat a key, or run out of keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from guided import regex
from guided.guard.domains import endless_pattern
from guided.guard.text import BEFORE_KEY, KEY, State
from guided.schema import string_pattern
from guided.schema.graph import read_graph

_MANY_NAMES = 300
"""Number of different names that no object exhausts."""


def open_object(source: str) -> str | None:
    """Return the pointer of an object with keys that the schema does not name, so that a library could repeat them.

    Args:
        source: a schema as JSON text.
    """
    if source in ("true", "false"):
        return "" if source == "true" else None
    return next((node.pointer for node in read_graph(source).reachable() if _is_open(node.schema)), None)


def few_names(source: str) -> re.Pattern[str] | None:
    """Return a regex for property names that an object may run out of; None if no object can.

    It does not cover the names in `properties`.
    """
    return _names(source, lambda pattern: endless_pattern(pattern, _MANY_NAMES))


def ending_names(source: str) -> re.Pattern[str] | None:
    """Return a regex for property names that may not be the beginning of a longer name; None if all names are.

    Once an object has such a key, its characters may not be written as a key again: only the key's end could follow.
    """
    return _names(source, lambda pattern: _goes_on(string_pattern.read(pattern)))


def _names(source: str, is_free: Callable[[str], bool]) -> re.Pattern[str] | None:
    """Return a regex that joins the patterns of property names that are not `is_free`; None if there are none."""
    if source in ("true", "false"):
        return None
    found: set[str] = set()
    for node in read_graph(source).reachable():
        names = node.schema.get("propertyNames", True)
        patterns = [*node.schema.get("patternProperties", {})]  # xgrammar may allow no others
        if isinstance(names, dict):
            patterns.append(names.get("pattern", ""))
            found |= set() if names.keys() <= {"type", "minLength", "pattern"} else {""}
        found.update(pattern for pattern in patterns if not is_free(pattern))
    return re.compile("|".join(regex.render(string_pattern.read(one)) for one in sorted(found))) if found else None


def _goes_on(node: regex.Node) -> bool:
    """Whether every match is certainly the beginning of a longer one."""
    match node:
        case regex.Sequence(items):
            return bool(items) and _goes_on(items[-1])
        case regex.Choice(options):
            return all(map(_goes_on, options))
        case regex.Repeat(_, _, high):
            return high is None
    return False


def may_repeat(state: State, text: bytearray) -> bool:
    """Whether the next token may end a key that its object has already."""
    if state.mode not in (KEY, BEFORE_KEY) or state.frame is None or not state.frame.keys:
        return False
    started = bytes(text[state.begin + 1 :]) if state.mode == KEY else b""
    return b"\\" in started or any(key.startswith(started) for key in state.frame.keys)


def _is_open(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "object")
    if "enum" in schema or "const" in schema:
        return False
    if "object" in types or (isinstance(types, list) and any(not isinstance(one, str) for one in types)):
        applied = schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
        if applied and not schema.keys() & {"properties", "patternProperties", "additionalProperties"}:
            return False  # as open as the schemas that it applies
        return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    anything = (schema.get(keyword, {}) for keyword in ("items", "additionalItems"))
    return "array" in types and (any(one is True for one in anything) or "items" not in schema)
