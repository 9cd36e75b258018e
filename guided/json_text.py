"""Read JSON text within limits.

A text that could exceed a limit is measured first, in linear time and without building
objects: `json.loads` recurses once per level of nesting, and a list of a million empty
lists takes a hundred megabytes.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np

from guided.errors import bounded

JsonObject = dict[str, Any]
"""A JSON object, such as a schema."""
MAX_NUMBER_LENGTH = 100
"""Maximum number of characters of a number. Common numbers (64 bits, double precision)
have at most 25."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[-+.eE0-9]{%d}" % (MAX_NUMBER_LENGTH + 1))
_NO_BRACKETS = bytes(set(range(256)).difference(b"[]{}"))


class JsonError(ValueError):
    """The text is not JSON, or an object in it has a key twice."""


class JsonTooLarge(JsonError):
    """The text exceeds a limit."""


def loads(
    text: str | bytes,
    *,
    max_values: int,
    max_nesting: int,
    max_members: int = sys.maxsize,
    constants: bool = False,
) -> Any:
    """Parse JSON (RFC 8259, UTF-8) that has at most `max_values` values and
    `max_nesting` levels of brackets.

    Args:
        max_members: maximum number of keys, objects and arrays together. They cost ten
            times as much as other values.
        constants: accept NaN and Infinity, as `json.loads` does.

    Raises:
        JsonTooLarge: `text` exceeds a limit.
        JsonError: `text` is not JSON, or an object in it has a key twice.
    """
    try:
        if isinstance(text, str):
            data = text.encode("utf-8", "surrogatepass")
            decoded = text
        else:
            data = text
            decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(
            f"not UTF-8: {bounded(error.reason)} at byte {error.start}"
        ) from None
    # a shorter text is within all limits
    if len(data) > min(max_values, max_nesting, max_members, MAX_NUMBER_LENGTH):
        _check_size(data, max_values, max_nesting, max_members)
    try:
        return json.loads(
            decoded,
            object_pairs_hook=_unique,
            parse_constant=None if constants else _refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at character {error.pos}") from None


def _check_size(
    data: bytes, max_values: int, max_nesting: int, max_members: int
) -> None:
    """Raise `JsonTooLarge` if `data` exceeds a limit. The check is exact up to the
    first character that is not JSON."""
    too_many = JsonTooLarge(f"there are more than {max_values} values")
    # a value is at most two strings: itself and its key
    if data.count(b'"') - data.count(b'\\"') > 4 * max_values:
        raise too_many
    outside = _STRING.sub(b"", data)
    brackets = outside.count(b"[") + outside.count(b"{")
    if 1 + brackets + outside.count(b",") > max_values:
        raise too_many
    codes = np.frombuffer(outside.translate(None, _NO_BRACKETS), np.uint8)
    steps = 2 * ((codes == ord("[")) | (codes == ord("{"))).astype(np.int8) - np.int8(1)
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > max_nesting:
        raise JsonTooLarge(f"it is nested deeper than {max_nesting} levels")
    if brackets + outside.count(b":") > max_members:
        raise JsonTooLarge(
            f"there are more than {max_members} keys, objects and arrays"
        )
    if _LONG_NUMBER.search(outside):
        raise JsonTooLarge(f"a number has more than {MAX_NUMBER_LENGTH} characters")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise JsonError(
                    f"the key {bounded(name, 80)!r} occurs twice in one object"
                )
            seen.add(name)
    return members


def _refuse_constant(name: str) -> Any:
    raise JsonError(f"{name} is not JSON")
