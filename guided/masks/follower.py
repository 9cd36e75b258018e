"""Follows a JSON value while it is written, token by token, and finds what no continuation mends."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Beginnings, Part, Place

_PART = re.compile(
    rb'(?P<mark>[{}\[\],:])|(?P<text>"(?:[^"\\]|\\.)*")|(?P<open>".*|[-+.\w]+\Z)|(?P<other>[-+.\w]+)', re.DOTALL
)
"""Matches a part of a JSON text: a bracket, comma or colon, a string, an open string or number, another scalar."""
_CHARACTERS = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
"""Matches the beginning of a string without an incomplete character."""
_TYPES = {b"{": dict, b"[": list, b'"': str, b"tf": bool, b"n": type(None), b"-+.0123456789": int}
"""The type of a value by its first character."""
BLANKS = [b" ", b"\n", b"\r", b"\t"]
_AFTER_SCALAR = [*BLANKS, b",", b"]", b"}"]
_NO_COMMA = [*BLANKS, *(bytes([byte]) for byte in b"0123456789.eE")]
"""What may follow a value in an object or array, other than a comma and the end."""
_TRIED = set(range(0x20, 0x7F)).difference(b'"\\')
_KEY = Part()


@dataclass(slots=True)
class _Open:
    """An open value, or an open key."""

    part: Part
    held_from: int | None
    """The token in which the innermost value with a checked keyword began: this one, or one around it."""
    newest: int
    """The token in which its newest member began, or else it."""
    value: Any = None
    """Of an object or array: its members so far, the open one too."""
    key: Any = None
    """Key or index of its newest member. None in an object: a key comes next."""


class Violation(NamedTuple):
    """Why a token must not follow an output."""

    error: ConstraintNotMet
    token: int
    """The number of the token in which the invalid value, or its newest member, began."""
    beginnings: list[bytes]
    """Tokens that begin with one of these must not follow either."""


class Follower:
    """Follows one content of an output.

    Args:
        beginnings: validates the beginnings of the content.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self.open = [_Open(beginnings.around, None, 0, [])]
        """The innermost open value last. The first one is not of the content: it has the content as its only item."""
        self._rest = b""
        """The text of the string, key, number or literal that is open."""
        self._is_free = False
        """It is the text of a key, or of a string without a pattern that is checked."""
        self._has_pattern = False
        """It is the text of a string with a pattern that is checked."""
        self.validates = False
        """Whether `read` looks for violations. If not, it follows an output that has been accepted."""

    @property
    def is_over(self) -> bool:
        """Whether the content has ended."""
        return len(self.open) == 1 and self.open[0].value != []

    def read(self, text: bytes, token: int) -> Violation | None:
        """Read the text of a token. After a violation, the state is undefined."""
        if self._is_free and b'"' not in text:
            self._rest += text
            return None
        known = len(self._rest)
        for match in _PART.finditer(self._rest + text):
            part = match[0]
            violation = None
            written = text[: max(0, match.end() - known)]
            before = written[: -len(part)]
            if part in b"}]":
                members = self.open[-1].value
                violation = self._end(members, [written, *(_NO_COMMA if members and not before else [])])
            elif part == b",":
                self.open[-1].key = None
            elif part != b":" and not self._rest:
                violation = self._begin(token, part[:1], before)
            if not match["mark"] and violation is None:
                if match["open"]:
                    self._rest = part
                    violation = self._go_on(written)
                else:
                    self._rest = b""
                    ends = [b""] if part.startswith(b'"') else _AFTER_SCALAR
                    violation = self._end(_read(part), [written + end for end in ends])
            if violation is not None or self.is_over:
                return violation
        return None

    def characters(self) -> list[bytes]:
        """Return the characters in ASCII that may follow in the open string, with its end. Empty: it has no pattern."""
        if not self._has_pattern:
            return []
        text = _text(self._rest)
        found = [bytes([code]) for code in _TRIED if self._violation("string", text + chr(code), []) is None]
        if self._violation("value", text, []):
            return found
        return [*found, b'"']

    def _begin(self, token: int, first: bytes, before: bytes) -> Violation | None:
        """Open a key, or a value with this first character, after the text `before` in its token."""
        around = self.open[-1]
        is_item = isinstance(around.value, list)
        if is_item:
            around.key = len(around.value)
            around.value.append(None)
        around.newest = token
        if around.key is None:
            self.open.append(_Open(_KEY, around.held_from, token))
            return None
        part = self._beginnings.below(around.part, 0 if is_item else around.key)
        self.open.append(_Open(part, token if part.is_checked else around.held_from, token))
        chars, form = next(item for item in _TYPES.items() if first in item[0])
        return self._violation("first", form(), [before + bytes([char]) for char in chars])

    def _go_on(self, written: bytes) -> Violation | None:
        """Read more of something that is open. A string may not match its pattern any more."""
        value = self.open[-1]
        is_string = self._rest.startswith(b'"')
        self._has_pattern = is_string and value.held_from is not None and bool(value.part.patterns)
        self._is_free = is_string and not self._has_pattern
        if self._has_pattern:
            return self._violation("string", _text(self._rest), [written])
        return None

    def _end(self, content: Any, bad: list[bytes]) -> Violation | None:
        """End a key or a value."""
        around = self.open[-2]
        self._is_free = self._has_pattern = False
        if around.key is None:
            around.key = content
            violation = self._violation("key", None, bad)
        else:
            violation = self._violation("value", content, bad)
        del self.open[-1]
        return violation

    def _violation(self, place: Place, content: Any, bad: list[bytes]) -> Violation | None:
        """Have the innermost open value this content. Returns what is wrong then."""
        value = self.open[-1]
        around = self.open[-2]
        around.value[around.key] = value.value = content
        if not self.validates or value.held_from is None or (place == "string" and value.part.may_match(content)):
            return None
        path: list[str | int] | None = [part.key for part in self.open[1:-1]]
        if place == "value":
            if path:
                path = path[:-1]
            else:
                path = None
        error = self._beginnings.error(self.open[0].value[0], path, place)
        if error is None:
            return None
        return Violation(error, value.newest, bad)


def _text(part: bytes) -> str:
    """Return the characters of the beginning of a JSON string, without an incomplete one at its end."""
    return str(json.loads(_CHARACTERS.findall(part.decode("utf-8", "ignore"))[0] + '"'))


def _read(part: bytes) -> Any:
    """Return a scalar. What a grammar library allows may not be JSON, such as `7.e-9`: the final check refuses it."""
    try:
        return json.loads(part)
    except ValueError:
        return part.decode("utf-8", "replace")
