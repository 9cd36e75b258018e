"""Objects of a schema that may repeat a key, or run out of keys."""

from __future__ import annotations

import re
from typing import Any

from guided import regex
from guided.guard.domains import endless_pattern
from guided.guard.text import BEFORE_KEY, KEY, State
from guided.schema import string_pattern
from guided.schema.graph import read_graph

_MANY_NAMES = 300
"""A number of names that no object exhausts."""


def open_object(source: str) -> str | None:
    """Return the pointer of an object with keys that the schema does not name, so that a library could repeat them.

    Args:
        source: a schema as JSON text.
    """
    if source in ("true", "false"):
        return "" if source == "true" else None
    return next((node.pointer for node in read_graph(source).reachable() if _is_open(node.schema)), None)


def few_names(source: str) -> re.Pattern[str] | None:
    """Return a regex for names of properties of which some object may run out; None if that can't be.

    Names that are listed as `properties` are not among them.
    """
    if source in ("true", "false"):
        return None
    found: set[str] = set()
    for node in read_graph(source).reachable():
        names = node.schema.get("propertyNames", True)
        closed = node.schema.get("additionalProperties", True) is False
        patterns = [*node.schema.get("patternProperties", {})] if closed else []
        if isinstance(names, dict):
            patterns.append(names.get("pattern", ""))
            found |= set() if names.keys() <= {"type", "minLength", "pattern"} else {""}
        found.update(pattern for pattern in patterns if not endless_pattern(pattern, _MANY_NAMES))
    return re.compile("|".join(regex.render(string_pattern.read(one)) for one in sorted(found))) if found else None


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
            return False  # as open as what it applies
        return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    anything = (schema.get(keyword, {}) for keyword in ("items", "additionalItems"))
    return "array" in types and (any(one is True for one in anything) or "items" not in schema)
