"""Read JSON text within limits.

A text that could exceed one is measured first, in linear time and without building objects: `json.loads` recurses once
per level of nesting, and a list of a million empty lists takes a hundred megabytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided.errors import bounded

MAX_NUMBER_LENGTH = 100
"""Maximum number of characters of a number. JSON's common numbers (64 bits, double precision) have at most 25."""

_BLOCK_BYTES = 1 << 18
"""The text is measured in blocks, so that the arrays stay small."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_IN_NUMBER = np.zeros(256, np.bool_)
_IN_NUMBER[list(b"0123456789+-.eE")] = True


class JsonError(ValueError):
    """The text is not JSON, or it has a key twice in one object."""


class JsonTooLarge(JsonError):
    """The text exceeds a limit."""


def loads(
    text: str | bytes, *, max_values: int, max_nesting: int, max_members: int = sys.maxsize, constants: bool = False
) -> Any:
    """Parse JSON (RFC 8259, UTF-8) that has at most `max_values` values and `max_nesting` levels of brackets.

    Args:
        max_members: maximum number of keys, objects and arrays together. They cost ten times as much as other values.
        constants: accept NaN and Infinity, as `json.loads` does.

    Raises:
        JsonTooLarge: over a limit.
        JsonError: not JSON, or a key occurs twice in one object.
    """
    try:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        decoded = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8: {bounded(error.reason)} at byte {error.start}") from None
    if len(data) > min(max_values, max_nesting, max_members, MAX_NUMBER_LENGTH):  # a shorter text is within all limits
        _Measure(max_values, max_nesting, max_members).check(data)
    try:
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=None if constants else _refuse_constant)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at character {error.pos}") from None


@dataclass
class _Measure:
    """State of one pass over a text. It is exact up to the first character that is not JSON, where parsing ends."""

    max_values: int
    max_nesting: int
    max_members: int
    values: int = 1
    members: int = 0
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    """The next character follows an odd number of backslashes."""
    number: int = 0
    """Length of the number at the end of the block."""

    def check(self, data: bytes) -> None:
        for start in range(0, len(data), _BLOCK_BYTES):
            self._check_block(np.frombuffer(data, np.uint8, min(_BLOCK_BYTES, len(data) - start), start))

    def _check_block(self, codes: NDArray[np.uint8]) -> None:
        quotes = codes == _QUOTE
        quotes &= ~self._escapes(codes)
        inside = np.bitwise_xor.accumulate(quotes) ^ self.in_string
        self.in_string = bool(inside[-1])
        outside = ~inside
        steps = np.where(outside, _STEP[codes], 0)
        depths = np.cumsum(steps, dtype=np.int32)
        if self.depth + int(depths.max()) > self.max_nesting:
            raise JsonTooLarge(f"it is nested deeper than {self.max_nesting} levels")
        self.depth += int(depths[-1])
        brackets = int(np.count_nonzero(steps > 0))
        self.values += brackets + int(np.count_nonzero((codes == ord(",")) & outside))
        self.members += brackets + int(np.count_nonzero((codes == ord(":")) & outside))
        if self.values > self.max_values:
            raise JsonTooLarge(f"there are more than {self.max_values} values")
        if self.members > self.max_members:
            raise JsonTooLarge(f"there are more than {self.max_members} keys, objects and arrays")
        self._check_numbers(_IN_NUMBER[codes] & outside)

    def _escapes(self, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return where a character follows an odd number of backslashes."""
        found = np.zeros(len(codes), np.bool_)
        found[0] = self.escaped
        slashes = codes == _BACKSLASH
        slashes[0] &= not self.escaped
        self.escaped = False
        positions = np.flatnonzero(slashes)
        if len(positions):
            first = np.diff(positions, prepend=-2) != 1
            starts = positions[first]
            ends = positions[np.append(first[1:], True)] + 1
            odd = ends[(ends - starts) % 2 == 1]
            self.escaped = bool(len(odd) and odd[-1] == len(codes))
            found[odd[: len(odd) - self.escaped]] = True
        return found

    def _check_numbers(self, numeric: NDArray[np.bool_]) -> None:
        others = np.flatnonzero(~numeric)
        gaps = np.diff(others, prepend=-1 - self.number, append=len(numeric))
        if int(gaps.max()) > MAX_NUMBER_LENGTH + 1:
            raise JsonTooLarge(f"a number has more than {MAX_NUMBER_LENGTH} characters")
        self.number = int(gaps[-1]) - 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise JsonError(f"the key {bounded(name, 80)!r} occurs twice in one object")
            seen.add(name)
    return members


def _refuse_constant(name: str) -> Any:
    raise JsonError(f"{name} is not JSON")
